"""What one grouped product looks like: shapes and dtypes, checked once for all implementations.

Legend: M rows, E groups, K inputs, N outputs.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from fornax.config.errors import KernelError
from fornax.kernels._grouped.weight import GroupedWeight
from fornax.kernels.registry import current_platform
from fornax.mesh import mesh_in_use

__all__ = ["GroupedCall", "GroupedInputs", "GroupedProducts", "describe"]


@dataclass(frozen=True)
class GroupedCall:
    """Shapes and dtypes of one call: what implementations look at when they decline."""

    platform: str
    rows: int
    groups: int
    inputs: int
    outputs: int
    dtype: str
    devices: int
    """Devices over which XLA is to divide the call; 1 inside `shard_map` and without a mesh."""


@dataclass(frozen=True)
class GroupedInputs:
    """The arrays of one call."""

    x_MK: jax.Array
    w_EKN: jax.Array | GroupedWeight
    sizes_E: jax.Array


@dataclass(frozen=True)
class GroupedProducts:
    """The two products that a call and its gradients are made of; a pair is a static argument."""

    by_group: Callable[[jax.Array, jax.Array, jax.Array, bool], jax.Array]
    """(x_MK, w_EKN or, transposed, w_ENK, sizes_E, transposed) to y_MN in the dtype of x."""
    outer: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
    """(x_MK, y_MN, sizes_E) to x_e^T y_e of each group, [E, K, N] in the dtype of x."""


def describe(inputs: GroupedInputs) -> GroupedCall:
    """Check the inputs of a call against each other and describe it.

    Raises:
        KernelError: shapes or dtypes that do not fit together.
    """
    x, w, sizes = inputs.x_MK, inputs.w_EKN, inputs.sizes_E
    if isinstance(w, GroupedWeight) and w.layer is None:
        raise KernelError(f"grouped_matmul: w{w.shape} is a stack of layers; take one with at()")
    if x.ndim != 2 or w.ndim != 3 or x.shape[1] != w.shape[1]:
        raise KernelError(
            f"grouped_matmul: x{x.shape} and w{w.shape} must be [M, K] and [E, K, N] with one K"
        )
    if sizes.shape != w.shape[:1] or sizes.dtype != jnp.int32:
        raise KernelError(
            f"grouped_matmul: group_sizes{sizes.shape} of {sizes.dtype} must be int32, one "
            f"for each of the {w.shape[0]} matrices of w"
        )
    wide = isinstance(w, GroupedWeight) and x.dtype == jnp.float32
    if not (wide or x.dtype == w.dtype) or not jnp.issubdtype(w.dtype, jnp.floating):
        raise KernelError(
            f"grouped_matmul: x is {x.dtype} and w {w.dtype}; use one floating dtype for both"
        )
    return GroupedCall(
        platform=current_platform(),
        rows=x.shape[0],
        groups=w.shape[0],
        inputs=w.shape[1],
        outputs=w.shape[2],
        dtype=jnp.dtype(w.dtype).name,
        devices=free_devices(),
    )


def free_devices() -> int:
    """Over how many devices XLA divides what is computed here: those not taken by `shard_map`."""
    mesh = mesh_in_use()
    if mesh is None:
        return 1
    manual = jax.sharding.get_abstract_mesh().manual_axes
    count = 1
    for axis, size in mesh.shape.items():
        count *= 1 if axis in manual else size
    return count
