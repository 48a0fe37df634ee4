"""Grouped products on TPU: JAX's megablox kernels (Gale et al. 2022), with tiles of our choice.

The kernels visit tiles of rows, those that two groups share once for each, so that their work grows
with the rows. They leave rows beyond the last group as memory was, which is masked here.

Legend: M rows, E groups, K inputs, N outputs.
"""

import jax
import jax.numpy as jnp

from fornax.kernels._grouped.call import GroupedCall, GroupedProducts
from fornax.kernels.registry import interpreting

__all__ = ["declines", "megablox"]

_LANES = 128
_MOST_ROWS = 512
_MOST_BYTES = 2048
"""Of a line of a tile: its operands, result and sums fit a core's default share of fast memory."""


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

    rows, N = x_MK.shape[0], w.shape[1 if transposed else 2]
    tile = _tile_of_rows(rows, w.shape[0])
    y_MN = gmm(
        _filled_up(x_MK, tile),
        w,
        sizes_E,
        preferred_element_type=x_MK.dtype,
        tiling=(tile, _tile_of(x_MK.shape[1], x_MK), _tile_of(N, x_MK)),
        transpose_rhs=transposed,
        interpret=interpreting(),
    )[:rows]
    return jnp.where(jnp.arange(rows)[:, None] < jnp.sum(sizes_E), y_MN, 0)


def _outer(x_MK: jax.Array, y_MN: jax.Array, sizes_E: jax.Array) -> jax.Array:
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

    tile = _tile_of_rows(x_MK.shape[0], sizes_E.shape[0])
    return tgmm(
        _filled_up(x_MK, tile).T,
        _filled_up(y_MN, tile),
        sizes_E,
        preferred_element_type=x_MK.dtype,
        tiling=(tile, _tile_of(x_MK.shape[1], x_MK), _tile_of(y_MN.shape[1], x_MK)),
        interpret=interpreting(),
    )


def _filled_up(x_MK: jax.Array, tile: int) -> jax.Array:
    return jnp.pad(x_MK, ((0, -x_MK.shape[0] % tile), (0, 0)))


def _tile_of_rows(rows: int, groups: int) -> int:
    """Return the rows of a tile: not many more than a group has, because groups share tiles."""
    mean = -(-rows // groups)
    return min(_MOST_ROWS, max(_LANES, 1 << (mean - 1).bit_length()))


def _tile_of(size: int, array: jax.Array) -> int:
    """Return how much of an axis is a tile: all, or the largest multiple of 128 that divides it."""
    most = _MOST_BYTES // array.dtype.itemsize
    if size <= most:
        return size
    dividing = [tile for tile in range(_LANES, most + 1, _LANES) if size % tile == 0]
    return max(dividing, default=most)


megablox = GroupedProducts(_by_group, _outer)
