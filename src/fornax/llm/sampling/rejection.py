"""Speculative sampling: a draft model's token stays, or one of what the draft left out is drawn.

A token y drawn from the draft's distribution q stays with probability min(1, p(y) / q(y)), where p
is the model's own; otherwise a token is drawn from max(p - q, 0). What comes out is distributed as
p and is the draft's token with probability sum(min(p, q)), which no scheme exceeds (Leviathan et
al. 2023, Chen et al. 2023).

Legend: M samples, R rows, A places ahead, V vocabulary.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from fornax.kernels import reductions

__all__ = ["Proposals", "correct", "init_proposals", "record"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Proposals:
    """What the draft model says about the next places of each row; place p is at p modulo A."""

    tokens: jax.Array
    """int32 [R, A]."""
    weights: jax.Array
    """uint16 [R, A, V], the bits of bfloat16: the distribution that the token was drawn from, not
    normalized. XLA on CPU writes rows of bfloat16 ten times as slowly as their bits."""


def init_proposals(rows: int, places: int, vocab_size: int) -> Proposals:
    """Room for the proposals of all rows: 2 V bytes a place."""
    return Proposals(
        tokens=jnp.zeros((rows, places), jnp.int32),
        weights=jnp.zeros((rows, places, vocab_size), jnp.uint16),
    )


def record(
    proposals: Proposals,
    rows_M: jax.Array,
    slots_M: jax.Array,
    tokens_M: jax.Array,
    weights_MV: jax.Array,
) -> Proposals:
    """Note what was proposed; `proposals` may be donated.

    Args:
        proposals: of all rows.
        rows_M: int32, none twice; R for padding.
        slots_M: int32, place modulo A.
        tokens_M: int32.
        weights_MV: bfloat16.
    """
    bits_MV = lax.bitcast_convert_type(weights_MV, jnp.uint16)
    return Proposals(
        tokens=proposals.tokens.at[rows_M, slots_M].set(tokens_M, mode="drop"),
        weights=proposals.weights.at[rows_M, slots_M].set(bits_MV, mode="drop"),
    )


def correct(
    weights_MV: jax.Array,
    proposals: Proposals,
    rows_M: jax.Array,
    slots_M: jax.Array,
    uniforms_M: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Keep the proposed tokens or say what to draw from in their stead.

    Args:
        weights_MV: float32, the model's distribution, not normalized.
        proposals: of all rows.
        rows_M: int32.
        slots_M: int32, place modulo A; -1 where nothing was proposed.
        uniforms_M: float32 in [0, 1), independent of the bits that drew the proposals.

    Returns:
        Tokens that stay, int32 [M], -1 where one must be drawn; and the weights to draw from.
    """
    found_M = slots_M >= 0
    index = jnp.maximum(rows_M, 0), jnp.maximum(slots_M, 0)
    token_M = proposals.tokens[index]
    draft_MV = lax.bitcast_convert_type(proposals.weights[index], jnp.bfloat16)
    target_MV, draft_MV = _normalized(weights_MV), _normalized(draft_MV.astype(jnp.float32))
    stays_M = uniforms_M * _at(draft_MV, token_M) < _at(target_MV, token_M)
    residual_MV = jnp.maximum(target_MV - draft_MV, 0)
    # Where the two are equal up to rounding, nothing may be left although a token was refused.
    corrected_M = found_M & (_total(residual_MV) > 0)
    residual_MV = jnp.where(corrected_M[:, None], residual_MV, weights_MV)
    return jnp.where(found_M & stays_M, token_M, -1), residual_MV


def _normalized(weights_MV: jax.Array) -> jax.Array:
    return weights_MV / _total(weights_MV)[:, None]


def _total(x_MV: jax.Array) -> jax.Array:
    return reductions.total(reductions.split(x_MV, 0.0))


def _at(x_MV: jax.Array, index_M: jax.Array) -> jax.Array:
    return jnp.take_along_axis(x_MV, index_M[:, None], axis=1)[:, 0]
