"""Chooses tokens on the device: one program for every mixture of requests.

Each part is behind a `lax.cond` on what the samples at hand ask for, so greedy requests pay for
an argmax and nothing else. Random bits are those of `fold_in(key(seed), position)`: a seeded
request draws the same tokens whatever runs beside it.

Legend: M samples, R rows, V vocabulary, W words of 32 tokens, K log probabilities a token.
"""

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fornax.llm import lanes
from fornax.llm.adjust import adjust, adjusts
from fornax.llm.filters import filtered
from fornax.llm.sampler_state import (
    Choice,
    RowParams,
    SamplerState,
    init_sampler_state,
    load_row,
)

__all__ = [
    "RowParams",
    "Sampled",
    "SamplerState",
    "Scored",
    "init_sampler_state",
    "load_row",
    "sample",
    "score",
]


class Scored(NamedTuple):
    """Log probabilities, in nats, under the model's own distribution."""

    logprobs: jax.Array
    """float32 [M], of the targets."""
    ranks: jax.Array
    """int32 [M], of the targets; 1 for the most likely token."""
    top_ids: jax.Array
    """int32 [M, K], most likely first."""
    top_logprobs: jax.Array
    """float32 [M, K]."""


class Sampled(NamedTuple):
    """What was chosen; all but the tokens are 0 unless log probabilities were wanted."""

    tokens: jax.Array
    """int32 [M]; -1 where the logits were not finite, or no token was allowed."""
    logprobs: jax.Array
    ranks: jax.Array
    top_ids: jax.Array
    top_logprobs: jax.Array


def sample(
    logits_MV: jax.Array,
    state: SamplerState,
    rows_M: jax.Array,
    positions_M: jax.Array,
    mask_MW: jax.Array,
    *,
    num_logprobs: int,
    want_logprobs: jax.Array | bool,
) -> tuple[Sampled, SamplerState]:
    """Choose a token for each sample, and note it in its row.

    Args:
        logits_MV: float32, the model's.
        state: may be donated.
        rows_M: int32, row of each sample; -1 for padding. Samples of one row only without
            penalties.
        positions_M: int32, index in the sequence of the token to choose.
        mask_MW: uint32, allowed tokens.
        num_logprobs: K.
        want_logprobs: whether some sample's log probabilities are wanted.
    """
    all_R = state.rows
    choice = jax.tree.map(lambda leaf_R: leaf_R[jnp.maximum(rows_M, 0)], all_R.choice)
    choice = replace(choice, temperature=jnp.where(rows_M >= 0, choice.temperature, 0.0))
    changing = adjusts(all_R.change, rows_M, mask_MW)

    def adjusted() -> jax.Array:
        return adjust(logits_MV, all_R.change, rows_M, mask_MW)

    tokens_M = lax.cond(
        changing | jnp.any(choice.temperature > 0),
        lambda: _choose(lax.cond(changing, adjusted, lambda: logits_MV), choice, positions_M),
        lambda: _most_likely(*_in_lanes(logits_MV)),
    )
    target_M = jnp.maximum(tokens_M, 0)
    scored = lax.cond(
        want_logprobs,
        lambda: score(logits_MV, target_M, num_logprobs),
        lambda: _unscored(len(tokens_M), num_logprobs),
    )
    noted_M = jnp.where(rows_M >= 0, rows_M, len(state.last_token))
    counts = all_R.change.counts.at[noted_M, target_M].add(1, mode="drop")
    state = SamplerState(
        last_token=state.last_token.at[noted_M].set(target_M, mode="drop"),
        rows=replace(all_R, change=replace(all_R.change, counts=counts)),
    )
    return Sampled(tokens_M, *scored), state


def score(logits_MV: jax.Array, targets_M: jax.Array, k: int) -> Scored:
    """Log probabilities of the targets and of the k most likely tokens.

    Args:
        logits_MV: float32.
        targets_M: int32.
        k: how many tokens, at most V.
    """
    x_MGL, max_M = _in_lanes(logits_MV)
    norm_M = max_M + jnp.log(lanes.total(jnp.exp(x_MGL - max_M[:, None, None])))
    target_M1 = jnp.take_along_axis(logits_MV, targets_M[:, None], axis=1)
    ranks_M = 1 + jnp.sum(logits_MV > target_M1, axis=1, dtype=jnp.int32)
    top_MK, ids_MK = lax.top_k(logits_MV, k)
    return Scored(target_M1[:, 0] - norm_M, ranks_M, ids_MK, top_MK - norm_M[:, None])


def _in_lanes(x_MV: jax.Array) -> tuple[jax.Array, jax.Array]:
    x_MGL = lanes.split(x_MV, -jnp.inf)
    return x_MGL, lanes.maximum(x_MGL)


def _most_likely(x_MGL: jax.Array, max_M: jax.Array) -> jax.Array:
    """Tokens, int32 [M]; -1 where logits are not finite."""
    return jnp.where(jnp.isfinite(max_M), lanes.argmax(x_MGL, max_M), -1)


def _choose(x_MV: jax.Array, choice: Choice, positions_M: jax.Array) -> jax.Array:
    """Tokens, int32 [M]; -1 where logits are not finite."""
    x_MGL, max_M = _in_lanes(x_MV)
    random_M = choice.temperature > 0
    greedy_M = _most_likely(x_MGL, max_M)
    drawn_M = lax.cond(
        jnp.any(random_M),
        lambda: _draw(x_MGL, max_M, choice, positions_M),
        lambda: greedy_M,
    )
    return jnp.where(random_M & (greedy_M >= 0), drawn_M, greedy_M)


def _draw(x_MGL: jax.Array, max_M: jax.Array, choice: Choice, positions_M: jax.Array) -> jax.Array:
    scale_M = jnp.where(choice.temperature > 0, choice.temperature, 1.0)
    depth_MGL = (max_M[:, None, None] - x_MGL) / scale_M[:, None, None]
    weight_MGL = jnp.exp(-depth_MGL)
    cutting = (choice.top_k < x_MGL[0].size) | (choice.top_p < 1) | (choice.min_p > 0)
    uniforms_M2 = jax.vmap(_uniforms)(choice.key, positions_M)
    kept_MGL = lax.cond(
        jnp.any(cutting & (choice.temperature > 0)),
        lambda: filtered(depth_MGL, weight_MGL, choice),
        lambda: weight_MGL,
    )
    return lanes.pick(kept_MGL, uniforms_M2)


def _uniforms(key: jax.Array, position: jax.Array) -> jax.Array:
    bits = jax.random.fold_in(jax.random.wrap_key_data(key, impl="threefry2x32"), position)
    return jax.random.uniform(bits, (2,))


def _unscored(samples: int, k: int) -> Scored:
    zeros = jnp.zeros((samples, k))
    return Scored(jnp.zeros(samples), jnp.zeros(samples, jnp.int32), zeros.astype(jnp.int32), zeros)
