"""What one linear cross-entropy call looks like, and the sums that it returns.

Legend: T tokens (all rows of a batch, flattened), D model width, V vocabulary, C tokens of a chunk.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fornax.config.errors import KernelError
from fornax.kernels._vocabulary import check_products
from fornax.kernels.registry import current_platform
from fornax.mesh import current_mesh, current_rules

__all__ = ["CrossEntropyCall", "CrossEntropyInputs", "LossSums", "batch_shards", "describe"]


class LossSums(NamedTuple):
    """Weighted sums over tokens, float32 scalars (float64 for float64 inputs).

    Only `loss_sum` and `weight_sum` carry gradients; the two others are for reports.
    """

    loss_sum: jax.Array
    """Sum of weight x (cross entropy + z-loss), in nats: what is differentiated."""
    weight_sum: jax.Array
    """Sum of the weights."""
    z_loss_sum: jax.Array
    """The part of `loss_sum` that is z-loss."""
    correct_sum: jax.Array
    """Sum of the weights of the tokens whose target has the highest logit."""


@dataclass(frozen=True)
class CrossEntropyCall:
    """Shapes, dtypes and options of one call: what implementations look at when they decline."""

    platform: str
    tokens: int
    width: int
    vocabulary: int
    dtype: str
    z_loss: bool
    softcap: float | None
    chunk: int
    shards: int


@dataclass(frozen=True)
class CrossEntropyInputs:
    """The arrays and options of one call; `chunk` is the whole mesh's tokens per chunk.

    Arrays of tokens may have two leading dimensions, batch and length, instead of one.
    """

    x_TD: jax.Array
    w_DV: jax.Array
    targets_T: jax.Array
    weights_T: jax.Array
    z_loss: float
    softcap: float | None
    chunk: int


def batch_shards() -> int:
    """Return over how many devices the mesh in use divides the tokens of a batch."""
    mesh = current_mesh()
    if mesh is None:
        return 1
    rules = current_rules()
    return math.prod(mesh.shape[axis] for axis in (*rules["batch"], *rules["length"]))


def describe(inputs: CrossEntropyInputs) -> CrossEntropyCall:
    """Check the inputs of a call against each other and describe it.

    Raises:
        KernelError: shapes, dtypes or options that do not fit together.
    """
    x, w, targets, weights = inputs.x_TD, inputs.w_DV, inputs.targets_T, inputs.weights_T
    check_products("linear_cross_entropy", x, w, targets, inputs.chunk, inputs.softcap)
    if weights.shape != x.shape[:-1]:
        raise KernelError(
            f"linear_cross_entropy: weights{weights.shape} need one value per token: {x.shape[:-1]}"
        )
    if inputs.z_loss < 0:
        raise KernelError(f"linear_cross_entropy: z_loss={inputs.z_loss} must be 0 or more")
    return CrossEntropyCall(
        platform=current_platform(),
        tokens=math.prod(x.shape[:-1]),
        width=x.shape[-1],
        vocabulary=w.shape[1],
        dtype=jnp.dtype(x.dtype).name,
        z_loss=inputs.z_loss > 0,
        softcap=inputs.softcap,
        chunk=inputs.chunk,
        shards=batch_shards(),
    )
