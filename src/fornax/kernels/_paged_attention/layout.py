"""Which token belongs to which row, and where it stands: the arithmetic of a ragged step.

Legend: T tokens of the step, R rows (sequences).
"""

import jax
import jax.numpy as jnp

__all__ = ["rows_and_positions"]


def rows_and_positions(
    query_start_R1: jax.Array, context_lens_R: jax.Array, tokens: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return each token's row, its position in that row's sequence, and whether it is no padding.

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
