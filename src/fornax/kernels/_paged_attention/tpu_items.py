"""How paged attention on TPU cuts a step into items: index arithmetic, once for all layers.

Legend: T tokens of the step, N query heads, K key heads, G = N / K, H head width, S slots of a
page, R rows (sequences), W pages of a table's row, M items, F fields of an item, B tokens of a
block.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from fornax.kernels._paged_attention.call import PagedInputs
from fornax.kernels._paged_attention.layout import rows_and_positions

__all__ = [
    "AHEAD",
    "FIELDS",
    "LANES",
    "SUBLANES",
    "Items",
    "block_tokens",
    "few_queries",
    "prepare",
]

LANES = 128
"""Numbers that a TPU keeps side by side; arrays are filled up to a multiple in their last axis."""
SUBLANES = 16
AHEAD = 4
"""Items by which writing is ahead of reading."""
FIELDS = ("block", "row", "token", "count", "position", "write", "write_end")
_BLOCK_QUERIES = 2048
"""Queries of all heads in a block, 128 wide: with their sums, and in float32, they and the buffers
take 12 of the 16 MiB of fast memory that a kernel may use on any TPU."""
_BLOCK_TOKENS = 128


def block_tokens(tokens: int, heads: int, kv_heads: int, head_dim: int) -> int:
    """Return B, the tokens of the step that one reading of the keys serves at most.

    Args:
        tokens: T.
        heads: N.
        kv_heads: K.
        head_dim: H.
    """
    most = _BLOCK_QUERIES // (heads * -(-head_dim // LANES))
    step = SUBLANES // math.gcd(SUBLANES, heads // kv_heads)
    return -(-min(_BLOCK_TOKENS, max(1, most), tokens) // step) * step


def few_queries(group: int) -> int:
    """Return how many queries of a key head an item of one token computes with.

    Loads begin at multiples of 16; the queries of any token lie in this many.

    Args:
        group: G.
    """
    if SUBLANES % group == 0:
        return SUBLANES
    spread = group if group % SUBLANES == 0 else group + SUBLANES - 1
    return -(-spread // SUBLANES) * SUBLANES


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Items:
    """A step cut into items."""

    count: jax.Array
    """int32: how many there are, M at most."""
    fields: jax.Array
    """int32 [F * (M + ahead)]: block, row of the table, first token in the block, tokens, the
    first one's position, and the tokens of the step [write, write_end) that it writes."""
    table_R1W: jax.Array
    """The page table, its rows filled up to lanes."""
    row_T2: jax.Array
    """int32: where the tokens of each token's row begin and end."""


def prepare(inputs: PagedInputs) -> Items:
    """Cut the step's tokens where rows and blocks begin.

    Writes are cut where pages begin: an item writes those whose first token is its own.
    """
    T, N, H = inputs.q_TNH.shape
    (R, W), S = inputs.page_table_RW.shape, inputs.kv_LPSCH.shape[2]
    B = block_tokens(T, N, inputs.kv_heads, H)
    M = min(T, R + -(-T // B) - 1)
    start_R1 = inputs.query_start_R1
    row_T, position_T, valid_T = rows_and_positions(start_R1, inputs.context_lens_R, T)
    token_T = jnp.arange(T, dtype=jnp.int32)
    begins_T = ((token_T == start_R1[row_T]) | (token_T % B == 0)) & valid_T
    begun_T = jnp.cumsum(begins_T, dtype=jnp.int32)
    number_M1 = jnp.arange(1, M + 2, dtype=jnp.int32)
    begin_M1 = jnp.searchsorted(begun_T, number_M1, method="compare_all")
    begin_M1 = jnp.minimum(begin_M1.astype(jnp.int32), start_R1[-1])
    begin_M, end_M = begin_M1[:-1], begin_M1[1:]
    at_M = jnp.minimum(begin_M, T - 1)
    row_M, position_M = row_T[at_M], position_T[at_M]
    count_M, row_end_M = end_M - begin_M, start_R1[row_M + 1]
    to_page_M = jnp.where(begin_M == start_R1[row_M], 0, -position_M % S)
    fields = {
        "block": at_M // B,
        "row": row_M,
        "token": begin_M % B,
        "count": count_M,
        "position": position_M,
        "write": jnp.minimum(begin_M + to_page_M, row_end_M),
        "write_end": jnp.minimum(end_M + -(position_M + count_M) % S, row_end_M),
    }
    found = count_M > 0
    fields_FM = jnp.stack([jnp.where(found, fields[name], 0) for name in FIELDS])
    return Items(
        count=jnp.sum(found, dtype=jnp.int32),
        fields=jnp.pad(fields_FM, ((0, 0), (0, AHEAD))).ravel(),
        table_R1W=jnp.pad(inputs.page_table_RW, ((0, 0), (0, -W % LANES)))[:, None],
        row_T2=jnp.stack([start_R1[row_T], start_R1[row_T + 1]], axis=1),
    )
