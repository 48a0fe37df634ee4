"""Paged attention on GPU: a Pallas kernel for Triton, one program per tile and key head.

A tile's queries of one key head are the rows of its products; a program walks through its row's
pages, keeping a running maximum and sum (Dao 2023).

Legend: T tokens of the step, N query heads, K key/value heads, G query heads per key head,
H head width, L layers, P pages, S slots of a page, C = 2 K, W pages of a table's row, M tiles,
Q queries of a tile, X rows of a program (Q * G and padding), D keys of a block.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from fornax.kernels._paged_attention.call import PagedCall, PagedInputs
from fornax.kernels._paged_attention.layout import Tiles, cut

__all__ = ["declines", "gpu", "prepare"]

ROWS = 64
"""Query heads of one key head that one reading of the keys serves, at most."""
_FEWEST_ROWS = 16
"""A tensor core's product has no fewer."""
_KEYS = 64
_LOWEST = -1e30


def declines(call: PagedCall) -> str | None:
    """Say why the GPU kernel cannot run `call`."""
    if call.platform != "gpu":
        return f"it runs on gpu, not on {call.platform}"
    H = call.head_dim
    if not 16 <= H <= 256 or H & (H - 1):
        return f"it needs heads whose width is a power of two from 16 to 256, not {H}"
    for dtype in (call.dtype, call.cache_dtype):
        if dtype not in ("float32", "bfloat16", "float16"):
            return f"it takes float32, bfloat16 and float16, not {dtype}"
    return None


def prepare(inputs: PagedInputs) -> Tiles:
    """Cut the step's tokens into tiles."""
    group = inputs.q_TNH.shape[1] // inputs.kv_heads
    return cut(inputs, max(1, ROWS // (1 << (group - 1).bit_length())))


def gpu(inputs: PagedInputs, *, interpret: bool = False) -> jax.Array:
    """Compute attention on one device; `interpret` runs the kernel without a GPU, for tests."""
    # Imported here: it pulls in Pallas, which nobody else needs.
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    _, N, H = inputs.q_TNH.shape
    L, P, S, C, _ = inputs.kv_LPSCH.shape
    K, G = C // 2, 2 * N // C
    tiles = inputs.prepared_for("pallas_gpu") or prepare(inputs)
    M, Q = tiles.token_MQ.shape
    X = max(_FEWEST_ROWS, pl.next_power_of_2(Q * G))
    table_MW = inputs.page_table_RW[tiles.row_M] + inputs.layer * P
    kernel = functools.partial(_kernel, inputs.scale, inputs.window, inputs.softcap, S)
    o_MKXH = pl.pallas_call(
        kernel,
        grid=(M, K),
        in_specs=[
            pl.BlockSpec((None, table_MW.shape[1]), lambda m, k: (m, 0)),
            pl.BlockSpec((None, X), lambda m, k: (m, 0)),
            pl.BlockSpec((None, X), lambda m, k: (k, 0)),
            pl.BlockSpec((None, None, X, H), lambda m, k: (m, k, 0, 0)),
            pl.BlockSpec((L * P * S, None, 2, H), lambda m, k: (0, k, 0, 0)),
        ],
        out_specs=pl.BlockSpec((None, None, X, H), lambda m, k: (m, k, 0, 0)),
        out_shape=jax.ShapeDtypeStruct((M, K, X, H), inputs.q_TNH.dtype),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="paged_attention",
    )(
        table_MW,
        _padded(jnp.repeat(tiles.position_MQ, G, axis=1), X, 1, -1),
        _sinks(inputs, K, Q, X),
        _queries(inputs, tiles, K, X),
        inputs.kv_LPSCH.reshape(L * P * S, K, 2, H),
    )
    o_MQNH = jnp.moveaxis(o_MKXH[:, :, : Q * G].reshape(M, K, Q, G, H), 1, 2).reshape(M, Q, N, H)
    o_TNH = o_MQNH[tiles.tile_T, tiles.offset_T]
    return jnp.where(tiles.valid_T[:, None, None], o_TNH, 0)


def _padded(array: jax.Array, size: int, axis: int, value: float) -> jax.Array:
    widths = [(0, 0)] * array.ndim
    widths[axis] = (0, size - array.shape[axis])
    return jnp.pad(array, widths, constant_values=value)


def _queries(inputs: PagedInputs, tiles: Tiles, K: int, X: int) -> jax.Array:
    """Return the tiles' queries by key head: [M, K, X, H]."""
    M, Q = tiles.token_MQ.shape
    q_MQKGH = inputs.q_TNH[tiles.token_MQ].reshape(M, Q, K, -1, inputs.q_TNH.shape[2])
    q_MKXH = jnp.moveaxis(q_MQKGH, 2, 1).reshape(M, K, -1, inputs.q_TNH.shape[2])
    return _padded(q_MKXH, X, 2, 0)


def _sinks(inputs: PagedInputs, K: int, Q: int, X: int) -> jax.Array:
    """Return each program row's sink, -1e30 for none: float32 [K, X]."""
    if inputs.sinks_N is None:
        return jnp.full((K, X), _LOWEST, jnp.float32)
    sinks_KG = inputs.sinks_N.astype(jnp.float32).reshape(K, -1)
    return _padded(jnp.tile(sinks_KG, (1, Q)), X, 1, _LOWEST)


def _kernel(
    scale: float,
    window: int | None,
    softcap: float | None,
    S: int,
    table_W: Any,
    position_X: Any,
    sinks_X: Any,
    q_XH: Any,
    kv_2H: Any,
    o_XH: Any,
) -> None:
    """One tile and one key head; the arguments are references, kv's to [L * P * S, 2, H]."""
    from jax.experimental.pallas import triton

    q, position, sinks = q_XH[...], position_X[...], sinks_X[...]
    exact = "highest" if q.dtype == jnp.float32 else None
    high = jnp.max(position) + 1
    low = jnp.zeros_like(high)
    if window is not None:
        first = jnp.min(jnp.where(position < 0, jnp.iinfo(jnp.int32).max, position))
        low = jnp.minimum(jnp.maximum(first - window + 1, 0), jnp.maximum(high, 0))

    def step(block: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        top, total, out = carry
        key = block * _KEYS + jnp.arange(_KEYS)
        here = (key >= low) & (key < high)
        page = table_W[jnp.clip(key, low, jnp.maximum(high - 1, 0)) // S]
        slot = page * S + key % S
        k = kv_2H[slot, 0].astype(q.dtype)
        v = jnp.where(here[:, None], kv_2H[slot, 1], 0).astype(q.dtype)
        scores = triton.dot(q, k.T, precision=exact) * scale
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        mask = key[None, :] <= position[:, None]
        if window is not None:
            mask &= key[None, :] > position[:, None] - window
        now = jnp.maximum(top, jnp.max(jnp.where(mask, scores, _LOWEST), axis=1))
        weights = jnp.where(mask, jnp.exp(scores - now[:, None]), 0)
        shrink = jnp.exp(top - now)
        added = triton.dot(weights.astype(q.dtype), v, precision=exact)
        total = total * shrink + jnp.sum(weights, axis=1)
        return now, total, out * shrink[:, None] + added

    start = (sinks, jnp.where(sinks > _LOWEST, 1.0, 0.0), jnp.zeros(q.shape, jnp.float32))
    blocks = (high + _KEYS - 1) // _KEYS
    _, total, out = jax.lax.fori_loop(low // _KEYS, blocks, step, start)
    o_XH[...] = (out / jnp.where(total == 0, 1, total)[:, None]).astype(o_XH.dtype)
