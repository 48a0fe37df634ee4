"""Paged attention on TPU: JAX's ragged paged attention kernel over our stack of layers.

Legend: T tokens of the step, N query heads, H head width, L layers, P pages, S slots of a page,
C = 2 x key heads, R rows (sequences), W pages of a table's row.
"""

import jax
import jax.numpy as jnp

from fornax.kernels._paged_attention.call import PagedCall, PagedInputs

__all__ = ["declines", "tpu"]

_LANES = 128
_DTYPES = ("float32", "bfloat16")
_BLOCK_BYTES = 2**21
"""Of keys and values in one of two buffers: a quarter of a TPU's fast memory at most in both."""
_MOST_KEYS = 512
QUERIES = 32
"""Queries that one reading of the keys serves, of whichever rows."""


def declines(call: PagedCall) -> str | None:
    """Say why the TPU kernel cannot run `call`."""
    if call.platform != "tpu":
        return f"it runs on tpu, not on {call.platform}"
    if call.head_dim % _LANES:
        return f"it needs heads whose width is a multiple of {_LANES}, not {call.head_dim}"
    for dtype in (call.dtype, call.cache_dtype):
        if dtype not in _DTYPES:
            return f"it takes float32 and bfloat16, not {dtype}"
    if call.sinks:
        return "it knows no sinks"
    if call.picks_head:
        return "the mesh holds every key head on every device"
    tiles, rest = divmod(2 * call.kv_heads * jnp.dtype(call.cache_dtype).itemsize, 4)
    if rest or (tiles not in (1, 2, 4) and tiles % 8):
        return f"it cannot tile {call.kv_heads} key heads of {call.cache_dtype}"
    return None


def tpu(inputs: PagedInputs) -> jax.Array:
    """Compute attention on one device.

    The kernel knows one layer's pages, so the stack is seen as one long list of them. It needs the
    rows with tokens to come first, and leaves padding's output as it was.
    """
    # Imported here: it pulls in Mosaic, which nobody else needs.
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    L, P, S, C, H = inputs.kv_LPSCH.shape
    start_R1 = inputs.query_start_R1
    used_R = start_R1[1:] > start_R1[:-1]
    order_R = jnp.argsort(~used_R, stable=True)
    rows = jnp.sum(used_R, dtype=jnp.int32).reshape(1)
    starts_R = jnp.where(used_R[order_R], start_R1[:-1][order_R], start_R1[-1])
    o_TNH = ragged_paged_attention(
        inputs.q_TNH,
        inputs.kv_LPSCH.reshape(L * P, S, C, H),
        inputs.context_lens_R[order_R],
        inputs.page_table_RW[order_R] + inputs.layer * P,
        jnp.append(starts_R, start_R1[-1]),
        rows,
        sm_scale=inputs.scale,
        sliding_window=inputs.window,
        soft_cap=inputs.softcap,
        num_kv_pages_per_block=_pages_of_block(inputs),
        num_queries_per_block=min(QUERIES, inputs.q_TNH.shape[0]),
    )
    padding_T = jnp.arange(inputs.q_TNH.shape[0]) >= start_R1[-1]
    return jnp.where(padding_T[:, None, None], 0, o_TNH)


def _pages_of_block(inputs: PagedInputs) -> int:
    """Return how many pages the kernel fetches at once.

    Its own table of block sizes asks which TPU is attached, so it cannot serve a compilation ahead
    of time; ours follows from the shapes.
    """
    _, _, S, C, H = inputs.kv_LPSCH.shape
    page_bytes = S * C * H * inputs.kv_LPSCH.dtype.itemsize
    pages = min(_MOST_KEYS // S, _BLOCK_BYTES // page_bytes, inputs.page_table_RW.shape[1])
    return max(1, pages)
