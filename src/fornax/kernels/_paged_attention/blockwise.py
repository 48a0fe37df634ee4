"""Paged attention in plain JAX: tiles of queries against a few pages at a time, on any platform.

Each row's tokens are cut into tiles, so that a tile needs one row's pages only. A loop gathers the
next pages of every tile, keeps a running maximum and sum (Rabe and Staats 2021), and ends at the
longest context in the step: tables' unused ends are never read.

On an accelerator the pages gathered at a time are as many as a bound on memory allows, and split:
each split's weighted values are summed by a product of their own and the splits are added after
(as Flash-Decoding does, Dao et al. 2023), so that a few long sequences occupy the whole device.

Legend: T tokens of the step, N query heads, K key/value heads, G query heads per key head,
H head width, S slots of a page, R rows (sequences), W pages of a table's row, M tiles,
Q queries of a tile, D keys of a block, Z splits of it, E keys of a split, C vectors of a key head.
"""

from typing import Any

import jax
import jax.numpy as jnp

from fornax.kernels._paged_attention.call import PagedInputs
from fornax.kernels._paged_attention.codes import QuantizedPages
from fornax.kernels._paged_attention.layout import Tiles, cut
from fornax.kernels.registry import current_platform

__all__ = ["blockwise", "prepare"]

_BLOCK = 128
"""Keys of a block on CPU: they stay in its cache."""
_MOST_BLOCK = 8192
_SPLIT = 256
"""Keys of a split, where a block has more."""
MOST_GATHERED = 2**27
"""Bytes of keys and values gathered at a time, unless 128 keys of every tile are more."""
LARGEST_TILE = 64
"""Queries of one row that one reading of the keys serves, at most."""
_LOWEST = -1e30


def prepare(inputs: PagedInputs) -> Tiles:
    """Cut the step's tokens into tiles."""
    return cut(inputs, LARGEST_TILE)


def blockwise(inputs: PagedInputs) -> jax.Array:
    """Compute attention; the products take q's dtype, scores and sums are float32 at least."""
    _, N, H = inputs.q_TNH.shape
    K = inputs.kv_heads
    S = inputs.kv_LPSCH.shape[2]
    dtype = jnp.promote_types(inputs.q_TNH.dtype, jnp.float32)
    tiles = inputs.prepared_for("xla") or prepare(inputs)
    M, Q = tiles.token_MQ.shape
    pages = max(1, _block(inputs, M) // S)
    table_RW = jnp.pad(inputs.page_table_RW, ((0, 0), (0, -inputs.page_table_RW.shape[1] % pages)))
    q_MQKGH = inputs.q_TNH[tiles.token_MQ].reshape(M, Q, K, N // K, H)

    def step(block: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        table_RD = jax.lax.dynamic_slice_in_dim(table_RW, block * pages, pages, axis=1)
        pages_MD = table_RD[tiles.row_M]
        k_MDKH, v_MDKH = _gather(inputs, pages_MD)
        key_D = block * pages * S + jnp.arange(pages * S, dtype=jnp.int32)
        mask_MQD = key_D <= tiles.position_MQ[:, :, None]
        if inputs.window is not None:
            mask_MQD &= key_D > tiles.position_MQ[:, :, None] - inputs.window
        # What a slot held before is not ours; were it NaN, a weight of 0 would not silence it.
        seen_MD11 = jnp.any(mask_MQD, axis=1)[:, :, None, None]
        v_MDKH = jnp.where(seen_MD11, v_MDKH, 0)
        scores = jnp.einsum("MQKGH,MDKH->MKGQD", q_MQKGH, k_MDKH, preferred_element_type=dtype)
        factors = None
        if isinstance(inputs.kv_LPSCH, QuantizedPages):
            scales_MDKC = _gather_scales(inputs, inputs.kv_LPSCH, pages_MD)
            scales_MDKC = jnp.where(seen_MD11, scales_MDKC, 0).astype(dtype)
            key_MK11D, factors = (
                jnp.moveaxis(scales_MDKC[..., part], 1, 2)[:, :, None, None] for part in (0, -1)
            )
            scores *= key_MK11D
        return _accumulate(inputs, scores, mask_MQD[:, None, None], v_MDKH, factors, carry)

    sinks = jnp.full((N,), -jnp.inf, dtype) if inputs.sinks_N is None else inputs.sinks_N
    sinks = jnp.broadcast_to(sinks.astype(dtype).reshape(K, N // K, 1), (M, K, N // K, Q))
    sunk = jnp.isfinite(sinks)
    carry = (
        jnp.where(sunk, sinks, _LOWEST),
        sunk.astype(dtype),
        jnp.zeros((M, K, N // K, Q, H), dtype),
    )
    low, high = _blocks(inputs, tiles, pages * S)
    _, total, out = jax.lax.fori_loop(low, high, step, carry)
    out = out / jnp.where(total == 0, 1, total)[..., None]
    o_TNH = jnp.moveaxis(out, 3, 1).reshape(M, Q, N, H)[tiles.tile_T, tiles.offset_T]
    return jnp.where(tiles.valid_T[:, None, None], o_TNH, 0).astype(inputs.q_TNH.dtype)


def _block(inputs: PagedInputs, tiles: int) -> int:
    """Return how many keys of every tile are gathered at a time: a power of two times 128."""
    if current_platform() == "cpu":
        return _BLOCK
    S = inputs.kv_LPSCH.shape[2]
    of_key = inputs.parts * inputs.kv_heads * inputs.q_TNH.shape[2] * inputs.q_TNH.dtype.itemsize
    longest = min(_MOST_BLOCK, inputs.page_table_RW.shape[1] * S)
    keys = _BLOCK
    while 2 * keys <= longest and 2 * keys * tiles * of_key <= MOST_GATHERED:
        keys *= 2
    return keys


def _blocks(inputs: PagedInputs, tiles: Tiles, width: int) -> tuple[Any, jax.Array]:
    """Return the first block that some query sees, and the one after the last."""
    high = (jnp.max(tiles.position_MQ) + width) // width
    if inputs.window is None:
        return jnp.zeros_like(high), high
    used = tiles.position_MQ >= 0
    first = jnp.min(jnp.where(used, tiles.position_MQ, jnp.iinfo(jnp.int32).max))
    return jnp.maximum(0, first - inputs.window + 1) // width, high


def _gather(inputs: PagedInputs, pages_MD: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return these pages' keys and values in q's dtype: [M, D, K, H] each; of a cache of codes
    these, which any dtype holds."""
    H = inputs.q_TNH.shape[2]
    pages = inputs.kv_LPSCH
    codes = pages.codes_LPSCH if isinstance(pages, QuantizedPages) else pages
    kv = (
        codes[inputs.layer, pages_MD]
        .reshape(pages_MD.shape[0], -1, inputs.kv_heads, inputs.parts, H)
        .astype(inputs.q_TNH.dtype)
    )
    return kv[:, :, :, 0], kv[:, :, :, -1]


def _gather_scales(inputs: PagedInputs, kv: QuantizedPages, pages_MD: jax.Array) -> jax.Array:
    """Return the scales of these pages' keys and values: [M, D, K, parts]."""
    scales = kv.scales_of(inputs.layer, pages_MD)
    return scales.reshape(pages_MD.shape[0], -1, inputs.kv_heads, inputs.parts)


def _accumulate(
    inputs: PagedInputs,
    scores: jax.Array,
    mask: jax.Array,
    v_MDKH: jax.Array,
    factors: jax.Array | None,
    carry: tuple[jax.Array, ...],
) -> tuple[jax.Array, ...]:
    """Add a block; `factors` are those of its values, [M, K, 1, 1, D]."""
    top, total, out = carry
    scores = scores * inputs.scale
    if inputs.softcap is not None:
        scores = inputs.softcap * jnp.tanh(scores / inputs.softcap)
    now = jnp.maximum(top, jnp.max(jnp.where(mask, scores, _LOWEST), axis=-1))
    weights = jnp.where(mask, jnp.exp(scores - now[..., None]), 0)
    shrink = jnp.exp(top - now)
    total = total * shrink + jnp.sum(weights, axis=-1)
    if factors is not None:
        weights = weights * factors
    added = _weighted(weights.astype(v_MDKH.dtype), v_MDKH, out.dtype)
    return now, total, out * shrink[..., None] + added


def _weighted(weights_MKGQD: jax.Array, v_MDKH: jax.Array, dtype: Any) -> jax.Array:
    """Return the values weighted and summed over the block's keys, a split at a time."""
    D = v_MDKH.shape[1]
    E = _SPLIT if D % _SPLIT == 0 else D
    weights = weights_MKGQD.reshape(*weights_MKGQD.shape[:-1], D // E, E)
    v_MZEKH = v_MDKH.reshape(v_MDKH.shape[0], D // E, E, *v_MDKH.shape[2:])
    parts = jnp.einsum("MKGQZE,MZEKH->ZMKGQH", weights, v_MZEKH, preferred_element_type=dtype)
    return jnp.sum(parts, axis=0)
