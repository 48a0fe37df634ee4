"""Grouped products on TPU: JAX's megablox kernels (Gale et al. 2022), with tiles of our choice.

The kernels visit tiles of rows, those that two groups share once for each, so that their work grows
with the rows. They leave rows beyond the last group as memory was, which is masked here.

Legend: M rows, E groups, K inputs, N outputs.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from fornax.kernels._grouped.call import GroupedCall, GroupedProducts
from fornax.kernels.registry import interpreting

__all__ = ["GroupedTiles", "declines", "grouped_tiles", "megablox"]

_LANES = 128
_MOST_ROWS = 512
_MOST_BYTES = 2048
"""Of a line of a tile: its operands, result and sums fit a core's default share of fast memory."""


@dataclass(frozen=True)
class GroupedTiles:
    """What one step of the kernels multiplies; of the product of rows with rows, the sum is over
    `rows`, and the other two are its result's."""

    rows: int
    contracted: int
    columns: int


def grouped_tiles(
    rows: int, groups: int, contracted: int, columns: int, *, itemsize: int
) -> GroupedTiles:
    """The tiles of a product [rows, contracted] x [groups, contracted, columns].

    Of rows not many more than a group has, because groups share tiles; of the other sides all, or
    the largest multiple of 128 that divides them.
    """
    return GroupedTiles(
        _tile_of_rows(rows, groups), _tile_of(contracted, itemsize), _tile_of(columns, itemsize)
    )


def declines(call: GroupedCall) -> str | None:
    """Say why the TPU kernels cannot run `call`."""
    if call.dtype not in ("float32", "bfloat16"):
        return f"it takes float32 and bfloat16, not {call.dtype}"
    if call.devices > 1:
        return f"the mesh in use divides arrays over {call.devices} devices; call it in shard_map"
    return None


def _by_group(x_MK: jax.Array, w: jax.Array, sizes_E: jax.Array, transposed: bool) -> jax.Array:
    # Imported here: it pulls in Mosaic, which nobody else needs.
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

    (rows, K), N = x_MK.shape, w.shape[1 if transposed else 2]
    tiles = grouped_tiles(rows, w.shape[0], K, N, itemsize=x_MK.dtype.itemsize)
    y_MN = gmm(
        _filled_up(x_MK, tiles.rows),
        w,
        sizes_E,
        preferred_element_type=x_MK.dtype,
        tiling=(tiles.rows, tiles.contracted, tiles.columns),
        transpose_rhs=transposed,
        interpret=interpreting(),
    )[:rows]
    return jnp.where(jnp.arange(rows)[:, None] < jnp.sum(sizes_E), y_MN, 0)


def _outer(x_MK: jax.Array, y_MN: jax.Array, sizes_E: jax.Array) -> jax.Array:
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

    (rows, K), N = x_MK.shape, y_MN.shape[1]
    tiles = grouped_tiles(rows, len(sizes_E), K, N, itemsize=x_MK.dtype.itemsize)
    return tgmm(
        _filled_up(x_MK, tiles.rows).T,
        _filled_up(y_MN, tiles.rows),
        sizes_E,
        preferred_element_type=x_MK.dtype,
        tiling=(tiles.rows, tiles.contracted, tiles.columns),
        interpret=interpreting(),
    )


def _filled_up(x_MK: jax.Array, tile: int) -> jax.Array:
    return jnp.pad(x_MK, ((0, -x_MK.shape[0] % tile), (0, 0)))


def _tile_of_rows(rows: int, groups: int) -> int:
    mean = -(-rows // groups)
    return min(_MOST_ROWS, max(_LANES, 1 << (mean - 1).bit_length()))


def _tile_of(size: int, itemsize: int) -> int:
    most = _MOST_BYTES // itemsize
    if size <= most:
        return size
    dividing = [tile for tile in range(_LANES, most + 1, _LANES) if size % tile == 0]
    return max(dividing, default=most)


megablox = GroupedProducts(_by_group, _outer)
