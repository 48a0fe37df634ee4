"""Decompositions of many square matrices, divided over the devices of the mesh.

Without it every device decomposes every matrix: XLA gathers what a factorisation reads whole, and
on all devices. Here each device holds and works on its share of the matrices (Anil et al. 2020,
section 4, do the same with Shampoo's inverse roots).

Shapes: K matrices of size M.
"""

import math
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fornax.mesh import current_mesh

__all__ = ["divide", "map_matrices", "product", "wide_dtype"]

Name = TypeVar("Name", bound=Hashable)


def product(a: jax.Array, b: jax.Array) -> jax.Array:
    """a b in full precision, on a TPU too."""
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)


def wide_dtype(x: jax.Array) -> jnp.dtype:
    """The dtype of an optimizer's state for a parameter or gradient: at least float32."""
    return jnp.promote_types(x.dtype, jnp.float32)


def divide(x_KMN: jax.Array) -> jax.Array:
    """Matrices laid out evenly over all devices of the mesh; whole on each where K does not divide.

    Their products then need no exchange. (jaxlib 0.10.2 divides products of blocks wrongly where
    two mesh axes meet in them.)
    """
    mesh = current_mesh()
    if mesh is None or mesh.size == 1:
        return x_KMN
    spec = PartitionSpec(mesh.axis_names) if x_KMN.shape[0] % mesh.size == 0 else PartitionSpec()
    return jax.lax.with_sharding_constraint(x_KMN, NamedSharding(mesh, spec))


def map_matrices(
    function: Callable[..., jax.Array], matrices: Mapping[Name, tuple[jax.Array, ...]]
) -> dict[Name, jax.Array]:
    """`function` of every matrix; those of one size are divided evenly over all devices.

    Args:
      function: of one or more [K, M, M] to [K, M, M], matrix by matrix, defined at the identity.
      matrices: by name, what it takes: arrays of one shape [..., M, M].
    """
    mesh = current_mesh()
    if mesh is None or mesh.size == 1:
        return {name: function(*arrays) for name, arrays in matrices.items()}
    results: dict[Name, jax.Array] = {}
    for size in dict.fromkeys(arrays[0].shape[-1] for arrays in matrices.values()):
        group = {name: x for name, x in matrices.items() if x[0].shape[-1] == size}
        results |= _of_one_size(function, group, mesh)
    return {name: results[name] for name in matrices}


def _of_one_size(
    function: Callable[..., jax.Array], group: Mapping[Name, tuple[jax.Array, ...]], mesh: Mesh
) -> dict[Name, jax.Array]:
    shapes = {name: arrays[0].shape for name, arrays in group.items()}
    counts = {name: math.prod(shape[:-2]) for name, shape in shapes.items()}
    stacks = [
        _padded([x.reshape(-1, *x.shape[-2:]) for x in same], mesh.size)
        for same in zip(*group.values(), strict=True)
    ]
    by_matrix = PartitionSpec(mesh.axis_names)
    # Stacks are put together and taken apart while their rows are divided: between the two an
    # all-to-all moves each number once, where XLA would gather slices of a divided stack whole.
    by_row = NamedSharding(mesh, PartitionSpec(None, mesh.axis_names, None))
    divided = jax.shard_map(function, mesh=mesh, in_specs=by_matrix, out_specs=by_matrix)
    found_KMM = divided(*(jax.lax.with_sharding_constraint(x, by_row) for x in stacks))
    found_KMM = jax.lax.with_sharding_constraint(found_KMM, by_row)
    results, start = {}, 0
    for name, count in counts.items():
        results[name] = found_KMM[start : start + count].reshape(shapes[name])
        start += count
    return results


def _padded(stacks: list[jax.Array], multiple: int) -> jax.Array:
    """Stacks of [K, M, M] as one, with identities up to a multiple of the devices."""
    size, dtype = stacks[0].shape[-1], stacks[0].dtype
    missing = -sum(x.shape[0] for x in stacks) % multiple
    identities = jnp.broadcast_to(jnp.eye(size, dtype=dtype), (missing, size, size))
    return jnp.concatenate([*stacks, identities])
