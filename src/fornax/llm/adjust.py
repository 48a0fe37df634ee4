"""Changes to logits that need to know tokens: masks, biases, penalties; in vLLM's order.

Legend: M samples, R rows, V vocabulary, W words of 32 tokens.
"""

import jax
import jax.numpy as jnp

from fornax.llm.masks import ALL
from fornax.llm.sampler_state import Change

__all__ = ["adjust", "adjusts", "unpack"]


def adjusts(all_R: Change, rows_M: jax.Array, mask_MW: jax.Array) -> jax.Array:
    """Whether `adjust` would change anything in these samples; bool."""
    vocab_size = all_R.counts.shape[-1]
    changing_R = (all_R.presence != 0) | (all_R.frequency != 0) | (all_R.repetition != 1)
    changing_R |= all_R.bias_ids[:, 0] < vocab_size
    return jnp.any(mask_MW != ALL) | jnp.any(changing_R[rows_M] & (rows_M >= 0))


def adjust(logits_MV: jax.Array, all_R: Change, rows_M: jax.Array, mask_MW: jax.Array) -> jax.Array:
    """Forbid what the mask leaves out, add biases, apply penalties.

    Args:
        logits_MV: float32.
        all_R: every row's.
        rows_M: int32, the row of each sample; -1 for padding.
        mask_MW: uint32; a bit for each allowed token.

    Returns:
        float32 [M, V]; -inf for forbidden tokens.
    """
    vocab_size = logits_MV.shape[-1]
    mine = jax.tree.map(lambda leaf_R: leaf_R[jnp.maximum(rows_M, 0)], all_R)
    x_MV = jnp.where(unpack(mask_MW, vocab_size), logits_MV, -jnp.inf)
    samples = jnp.arange(len(x_MV))[:, None]
    x_MV = x_MV.at[samples, mine.bias_ids].add(mine.biases, mode="drop")
    used_MV = mine.counts > 0
    seen_MV = used_MV | unpack(mine.prompt, vocab_size)
    factor_M1 = mine.repetition[:, None]
    x_MV = jnp.where(seen_MV, jnp.where(x_MV > 0, x_MV / factor_M1, x_MV * factor_M1), x_MV)
    x_MV -= mine.frequency[:, None] * mine.counts
    return x_MV - mine.presence[:, None] * used_MV


def unpack(mask_MW: jax.Array, vocab_size: int) -> jax.Array:
    """Bits to bool [M, V]."""
    bits = (mask_MW[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    return bits.reshape(len(mask_MW), -1)[:, :vocab_size] > 0
