"""Paged attention on TPU: JAX's ragged paged attention kernel over our stack of layers.

The kernel holds the page table of its rows in scalar memory, which is small. A step whose table is
larger runs in chunks: each takes as many tokens as rows fit there, so it meets no more rows.

Legend: T tokens of the step, N query heads, H head width, L layers, P pages, S slots of a page,
C = 2 x key heads, R rows (sequences), W pages of a table's row, M chunks, B tokens of a chunk,
Q rows of a chunk.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from fornax.kernels._paged_attention.call import PagedCall, PagedInputs

__all__ = [
    "TPU_LANES",
    "Chunks",
    "declines",
    "paged_table_fits",
    "prepare",
    "rows_at_once",
    "tpu",
]

TPU_LANES = 128
"""Numbers that a TPU keeps side by side; arrays are filled up to a multiple in their last axis."""
_DTYPES = ("float32", "bfloat16")
_TABLE_BYTES = 2**19
"""Of a page table in scalar memory: half of it."""
_BLOCK_BYTES = 2**21
"""Of keys and values in one of two buffers: a quarter of a TPU's fast memory at most in both."""
_MOST_KEYS = 512
QUERIES = 32
"""Queries that one reading of the keys serves, of whichever rows."""


def rows_at_once(rows: int, table_width: int) -> int:
    """Return how many of `rows` rows of a page table fit in scalar memory, 0 if not even one.

    Args:
        rows: R.
        table_width: W.
    """
    row_bytes = -(-table_width // TPU_LANES) * TPU_LANES * 4
    fitting = _TABLE_BYTES // row_bytes
    return rows if rows <= fitting else (1 << fitting.bit_length()) >> 1


def paged_table_fits(rows: int, table_width: int) -> bool:
    """Return whether a TPU's scalar memory takes a page table of this size as a whole."""
    return rows_at_once(rows, table_width) == rows


def declines(call: PagedCall) -> str | None:
    """Say why the TPU kernel cannot run `call`."""
    if call.head_dim % TPU_LANES:
        return f"it needs heads whose width is a multiple of {TPU_LANES}, not {call.head_dim}"
    for dtype in (call.dtype, call.cache_dtype):
        if dtype not in _DTYPES:
            return f"it takes float32 and bfloat16, not {dtype}"
    if call.shared:
        return "it reads keys and values apart"
    if call.sinks:
        return "it knows no sinks"
    tiles, rest = divmod(2 * call.kv_heads * jnp.dtype(call.cache_dtype).itemsize, 4)
    if rest or (tiles not in (1, 2, 4) and tiles % 8):
        return f"it cannot tile {call.kv_heads} key heads of {call.cache_dtype}"
    if not rows_at_once(call.rows, call.table_width):
        return (
            f"a sequence's page table of {call.table_width} pages does not fit in scalar memory; "
            "use larger pages (block_size)"
        )
    return None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Chunks:
    """A step's rows as its chunks see them."""

    first_M: jax.Array
    """The row that a chunk's first token belongs to."""
    rows_M: jax.Array
    """Rows with tokens in a chunk."""
    start_MQ1: jax.Array
    """Where each of these rows' tokens begin in the chunk."""
    context_MQ: jax.Array
    """Tokens of these rows up to the end of the chunk."""
    table_RW: jax.Array
    """The page table, with rows added so that those of every chunk can be sliced from it."""


def prepare(inputs: PagedInputs) -> Chunks:
    """Divide the step among chunks: one if the whole page table fits in scalar memory."""
    table_RW, start_R1 = inputs.page_table_RW, inputs.query_start_R1
    T, (R, W) = inputs.q_TNH.shape[0], table_RW.shape
    Q = rows_at_once(R, W)
    B = T if Q == R else Q
    begin_M1 = jnp.arange(0, T, B, dtype=jnp.int32)[:, None]
    first_M = jnp.searchsorted(start_R1[1:], begin_M1[:, 0], side="right", method="compare_all")
    first_M = jnp.minimum(first_M, R - 1).astype(jnp.int32)
    edge_MQ1 = start_R1[jnp.minimum(first_M[:, None] + jnp.arange(Q + 1), R)]
    start_MQ1 = jnp.clip(edge_MQ1 - begin_M1, 0, B)
    row_MQ = jnp.minimum(first_M[:, None] + jnp.arange(Q), R - 1)
    after_MQ = jnp.maximum(edge_MQ1[:, 1:] - (begin_M1 + B), 0)
    return Chunks(
        first_M=first_M,
        rows_M=jnp.sum(start_MQ1[:, 1:] > start_MQ1[:, :-1], axis=1, dtype=jnp.int32),
        start_MQ1=start_MQ1,
        context_MQ=inputs.context_lens_R[row_MQ] - after_MQ,
        table_RW=table_RW if Q == R else jnp.pad(table_RW, ((0, Q), (0, 0))),
    )


def tpu(inputs: PagedInputs) -> jax.Array:
    """Compute attention on one device; the rows with tokens come first."""
    chunks = inputs.prepared_for("pallas_tpu") or prepare(inputs)
    T, tokens = inputs.q_TNH.shape[0], inputs.query_start_R1[-1]
    M = chunks.first_M.shape[0]
    if M == 1:
        o_TNH = _attend(inputs, chunks, 0, inputs.q_TNH)
    else:
        B = chunks.context_MQ.shape[1]
        q_TNH = jnp.pad(inputs.q_TNH, ((0, M * B - T), (0, 0), (0, 0)))

        def chunk(index: jax.Array, o_TNH: jax.Array) -> jax.Array:
            q_BNH = jax.lax.dynamic_slice_in_dim(q_TNH, index * B, B)
            o_BNH = _attend(inputs, chunks, index, q_BNH)
            return jax.lax.dynamic_update_slice_in_dim(o_TNH, o_BNH, index * B, 0)

        o_TNH = jax.lax.fori_loop(0, (tokens + B - 1) // B, chunk, jnp.zeros_like(q_TNH))[:T]
    return jnp.where(jnp.arange(T)[:, None, None] >= tokens, 0, o_TNH)


def _attend(
    inputs: PagedInputs, chunks: Chunks, index: jax.Array | int, q_BNH: jax.Array
) -> jax.Array:
    """Run the kernel on one chunk; what it returns for padding is undefined.

    It knows one layer's pages, so the stack is seen as one long list of them.
    """
    # Imported here: it pulls in Mosaic, which nobody else needs.
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    L, P, S, C, H = inputs.kv_LPSCH.shape
    Q = chunks.context_MQ.shape[1]
    table_QW = jax.lax.dynamic_slice_in_dim(chunks.table_RW, chunks.first_M[index], Q)
    return ragged_paged_attention(
        q_BNH,
        inputs.kv_LPSCH.reshape(L * P, S, C, H),
        chunks.context_MQ[index],
        table_QW + inputs.layer * P,
        chunks.start_MQ1[index],
        chunks.rows_M[index].reshape(1),
        sm_scale=inputs.scale,
        sliding_window=inputs.window,
        soft_cap=inputs.softcap,
        num_kv_pages_per_block=_pages_of_block(inputs),
        num_queries_per_block=min(QUERIES, q_BNH.shape[0]),
    )


def _pages_of_block(inputs: PagedInputs) -> int:
    """Return how many pages the kernel fetches at once.

    Its own table of block sizes asks which TPU is attached, so it cannot serve a compilation ahead
    of time; ours follows from the shapes.
    """
    _, _, S, C, H = inputs.kv_LPSCH.shape
    page_bytes = S * C * H * inputs.kv_LPSCH.dtype.itemsize
    pages = min(_MOST_KEYS // S, _BLOCK_BYTES // page_bytes, inputs.page_table_RW.shape[1])
    return max(1, pages)
