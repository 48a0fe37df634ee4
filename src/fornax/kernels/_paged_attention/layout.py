"""Which token belongs to which row, and where it stands: the arithmetic of a ragged step.

Legend: T tokens of the step, R rows (sequences), M tiles, Q queries of a tile, K key heads,
H head width, V vectors of a slot, C rows of it, which are W wide.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from fornax.kernels._paged_attention.call import PagedInputs
from fornax.kernels._paged_attention.codes import QuantizedPages, encode

__all__ = ["Tiles", "cut", "rows_and_positions", "slot_codes", "slot_rows"]


def slot_vectors(k_TKH: jax.Array, v_TKH: jax.Array | None) -> jax.Array:
    """Return each token's keys and values in the order of a slot, [T, V, H]: k0, v0, k1, v1, …, or
    keys alone."""
    parts = (k_TKH,) if v_TKH is None else (k_TKH, v_TKH)
    return jnp.stack(parts, axis=2).reshape(k_TKH.shape[0], -1, k_TKH.shape[2])


def slot_rows(k_TKH: jax.Array, v_TKH: jax.Array | None, kv_LPSCW: jax.Array) -> jax.Array:
    """Return each token's key and value as the slots of a cache hold them, [T, C, W]."""
    rows = slot_vectors(k_TKH, v_TKH).reshape(k_TKH.shape[0], *kv_LPSCW.shape[3:])
    return rows.astype(kv_LPSCW.dtype)


def slot_codes(
    k_TKH: jax.Array, v_TKH: jax.Array | None, kv: QuantizedPages
) -> tuple[jax.Array, jax.Array]:
    """Return each token's codes as the slots of a cache hold them, [T, C, W], and scales [T, V]."""
    codes_TVH, scales_TV = encode(slot_vectors(k_TKH, v_TKH), kv.dtype)
    return codes_TVH.reshape(-1, *kv.shape[3:]), scales_TV


def rows_and_positions(
    query_start_R1: jax.Array, context_lens_R: jax.Array, tokens: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return each token's row, its position in that row's sequence, and whether it is not padding.

    Args:
        query_start_R1: int32, where each row's tokens begin; the last entry is where padding does.
        context_lens_R: int32, each row's tokens including this step's.
        tokens: T.

    Returns:
        int32 row [T] (some valid row for padding), int32 position [T], bool [T].
    """
    token_T = jnp.arange(tokens, dtype=jnp.int32)
    row_T = jnp.searchsorted(query_start_R1[1:], token_T, side="right", method="compare_all")
    row_T = jnp.minimum(row_T, context_lens_R.shape[0] - 1).astype(jnp.int32)
    position_T = context_lens_R[row_T] - (query_start_R1[row_T + 1] - token_T)
    return row_T, position_T, token_T < query_start_R1[-1]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tiles:
    """How the step's tokens are cut: tiles M of Q queries, each of one row."""

    row_M: jax.Array
    token_MQ: jax.Array
    position_MQ: jax.Array
    """-1 where a tile has no query."""
    tile_T: jax.Array
    offset_T: jax.Array
    valid_T: jax.Array


def cut(inputs: PagedInputs, largest: int) -> Tiles:
    """Cut each row's tokens into tiles of one size, a power of two up to `largest`."""
    T = inputs.q_TNH.shape[0]
    R = inputs.context_lens_R.shape[0]
    Q = largest
    while Q > 1 and Q * R > T:  # as many tiles as rows, and as many queries as tokens, at most x 2
        Q //= 2
    M = min(T, T // Q + R)
    start_R1 = inputs.query_start_R1
    tiles_R = (start_R1[1:] - start_R1[:-1] + Q - 1) // Q
    last_R = jnp.cumsum(tiles_R)
    first_R = last_R - tiles_R

    def row_of(ends_R: jax.Array, index: jax.Array) -> jax.Array:
        row = jnp.searchsorted(ends_R, index, side="right", method="compare_all")
        return jnp.minimum(row, R - 1)

    tile_M = jnp.arange(M, dtype=jnp.int32)
    row_M = row_of(last_R, tile_M)
    begin_M = start_R1[row_M] + (tile_M - first_R[row_M]) * Q
    end_M = start_R1[row_M + 1]
    token_MQ = begin_M[:, None] + jnp.arange(Q, dtype=jnp.int32)
    position_MQ = inputs.context_lens_R[row_M][:, None] - (end_M[:, None] - token_MQ)
    inside = (token_MQ < end_M[:, None]) & (tile_M < last_R[-1])[:, None]
    token_T = jnp.arange(T, dtype=jnp.int32)
    row_T = row_of(start_R1[1:], token_T)
    within_T = token_T - start_R1[row_T]
    return Tiles(
        row_M=row_M,
        token_MQ=jnp.clip(token_MQ, 0, T - 1),
        position_MQ=jnp.where(inside, position_MQ, -1),
        tile_T=jnp.clip(first_R[row_T] + within_T // Q, 0, M - 1),
        offset_T=within_T % Q,
        valid_T=token_T < start_R1[-1],
    )
