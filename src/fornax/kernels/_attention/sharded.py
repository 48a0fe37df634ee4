"""Running a kernel that XLA cannot partition: on each device, for the rows and heads it holds.

Legend: B batch, T query tokens, S key tokens, N query heads, K key/value heads, H head width.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
from jax.sharding import Mesh, PartitionSpec

from fornax.mesh import current_mesh, current_rules

__all__ = ["Division", "divide", "length_axes", "length_shards", "over_mesh"]

Attend = Callable[
    [jax.Array, jax.Array, jax.Array, tuple[jax.Array, ...], jax.Array],
    jax.Array,
]


@dataclass(frozen=True)
class Division:
    """How the mesh in use divides one call: mesh axes, None where they do not divide evenly."""

    mesh: Mesh
    rows: tuple[str, ...] | None
    """Axes that divide the batch."""
    heads: tuple[str, ...] | None
    """Axes that divide the heads of queries and of keys."""

    @property
    def counts(self) -> tuple[int, int]:
        """Over how many devices the batch and the heads divide."""
        return self.shards(self.rows), self.shards(self.heads)

    def shards(self, axes: tuple[str, ...] | None) -> int:
        """Return over how many devices `axes` divide."""
        return math.prod(self.mesh.shape[axis] for axis in axes or ())


def length_axes() -> tuple[str, ...]:
    """Return the mesh axes in use that divide the length of a batch."""
    mesh = current_mesh()
    if mesh is None:
        return ()
    return tuple(axis for axis in current_rules()["length"] if mesh.shape[axis] > 1)


def length_shards() -> int:
    """Return over how many devices the mesh in use divides the length of a batch."""
    mesh = current_mesh()
    return math.prod(mesh.shape[axis] for axis in length_axes()) if mesh is not None else 1


def divide(q_BTNH: jax.Array, k_BSKH: jax.Array) -> Division | None:
    """Return how the mesh in use divides attention over these arrays, None on one device."""
    mesh = current_mesh()
    if mesh is None or mesh.size == 1:
        return None
    rules = current_rules()
    return Division(
        mesh=mesh,
        rows=_dividing(mesh, rules["batch"], q_BTNH.shape[0]),
        heads=_dividing(mesh, rules["activation_heads"], q_BTNH.shape[2], k_BSKH.shape[2]),
    )


def over_mesh(
    attend: Attend,
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    tokens: tuple[jax.Array, ...],
    sinks_N: jax.Array,
) -> jax.Array:
    """Run `attend` under the mesh in use, batch and heads divided where they divide evenly.

    Args:
        attend: the kernel on one device.
        q_BTNH: queries.
        k_BSKH: keys.
        v_BSKH: values.
        tokens: int32 positions and segment ids, each [B, T] or [B, S].
        sinks_N: one value per query head, or empty.
    """
    division = divide(q_BTNH, k_BSKH)
    if division is None:
        return attend(q_BTNH, k_BSKH, v_BSKH, tokens, sinks_N)
    by_head = PartitionSpec(division.rows, None, division.heads, None)
    by_row = PartitionSpec(division.rows, None)
    sinks = PartitionSpec(division.heads) if sinks_N.size else PartitionSpec()
    return jax.shard_map(
        attend,
        mesh=division.mesh,
        in_specs=(by_head, by_head, by_head, (by_row,) * len(tokens), sinks),
        out_specs=by_head,
        check_vma=False,
    )(q_BTNH, k_BSKH, v_BSKH, tokens, sinks_N)


def _dividing(mesh: Mesh, axes: tuple[str, ...], *sizes: int) -> tuple[str, ...] | None:
    """Return the mesh axes that divide dimensions of these sizes, None if they do not evenly."""
    axes = tuple(axis for axis in axes if mesh.shape[axis] > 1)
    shards = math.prod(mesh.shape[axis] for axis in axes)
    return axes if axes and all(size % shards == 0 for size in sizes) else None
