"""Chooses tokens on the device: one program for every mixture of requests.

Each part is behind a `lax.cond` on what the current samples ask for, so greedy requests pay for
an argmax and nothing else. Random bits are those of `fold_in(key(seed), position)`: a seeded
request draws the same tokens whatever runs beside it. A draft model draws with bits of its own
(`propose`), and the model keeps or corrects what it proposed (`fornax.llm.sampling.rejection`).

Legend: M samples, R rows, V vocabulary, W words of 32 tokens, K log probabilities a token.
"""

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fornax import kernels
from fornax.kernels import reductions
from fornax.llm.config import LogprobsMode
from fornax.llm.sampling.masks import ALL, full_mask
from fornax.llm.sampling.rejection import Proposals, correct, record
from fornax.llm.sampling.state import KEEP_ALL, DrawParams, LogitParams, SamplerState

__all__ = ["Sampled", "Scored", "propose", "sample", "score"]

_DRAFT, _KEEP = 1, 2
"""Further streams of random bits of a position: to propose a token, and to keep it."""


class Scored(NamedTuple):
    """Log probabilities, in nats."""

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


@jax.named_scope("sampling")
def sample(
    logits_MV: jax.Array,
    state: SamplerState,
    rows_M: jax.Array,
    positions_M: jax.Array,
    mask_MW: jax.Array,
    *,
    num_logprobs: int,
    want_logprobs: jax.Array | bool,
    logprobs_mode: LogprobsMode = "raw_logprobs",
    proposals: Proposals | None = None,
    slots_M: jax.Array | None = None,
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
        logprobs_mode: of which distribution, see `EngineConfig`.
        proposals: a draft model's, of all rows; None without one.
        slots_M: int32, which of its row's proposals is for the sample; -1 for none.
    """
    all_R = state.rows
    choice = _choices(all_R.choice, rows_M)
    changing = needs_processing(all_R.change, rows_M, mask_MW)

    def adjusted() -> jax.Array:
        return process_logits(logits_MV, all_R.change, rows_M, mask_MW)

    def draw(x_MV: jax.Array) -> jax.Array:
        filters, uniforms_M2 = _filters(choice), _uniforms(choice, positions_M, 2)
        if proposals is None or slots_M is None:
            return kernels.sample_tokens(x_MV, uniforms_M2, filters)
        proposed_M = (slots_M >= 0) & (choice.temperature > 0)
        cut_MV = kernels.filter_logits(x_MV, filters)

        def corrected() -> tuple[jax.Array, jax.Array]:
            uniforms_M = _uniforms(choice, positions_M, 1, stream=_KEEP)[:, 0]
            kept_M, weights_MV = correct(
                _weights(cut_MV, choice), proposals, rows_M, slots_M, uniforms_M
            )
            left_MV = jnp.log(weights_MV) * _scale(choice)[:, None]
            return kept_M, jnp.where(proposed_M[:, None], left_MV, cut_MV)

        kept_M, left_MV = lax.cond(
            jnp.any(proposed_M), corrected, lambda: (jnp.full_like(rows_M, -1), cut_MV)
        )
        drawn_M = kernels.sample_tokens(left_MV, uniforms_M2, _unfiltered(filters))
        return jnp.where(proposed_M & (kept_M >= 0), kept_M, drawn_M)

    def scored(reported: tuple[jax.Array, ...], target_M: jax.Array) -> Scored:
        if not reported:
            return score(logits_MV, target_M, num_logprobs)
        (reported_MV,) = reported
        if logprobs_mode == "processed_logprobs":
            reported_MV = kernels.filter_logits(reported_MV, _filters(choice))
        scale_M = _scale(choice)
        # The trainer's own function of logits, so that its log-probs differ by rounding alone.
        own = kernels.logits_logprobs(reported_MV, target_M, temperature=scale_M)
        found = score(reported_MV / scale_M[:, None], target_M, num_logprobs)
        return found._replace(logprobs=own.logprobs)

    def choose() -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """Tokens, and the logits to report of, unless they are the model's own."""
        x_MV = lax.cond(changing, adjusted, lambda: logits_MV)
        return draw(x_MV), () if logprobs_mode == "raw_logprobs" else (x_MV,)

    def most_likely() -> tuple[jax.Array, tuple[jax.Array, ...]]:
        own = () if logprobs_mode == "raw_logprobs" else (logits_MV,)
        return kernels.argmax(logits_MV), own

    tokens_M, reported = lax.cond(changing | jnp.any(choice.temperature > 0), choose, most_likely)
    target_M = jnp.maximum(tokens_M, 0)
    found = lax.cond(
        want_logprobs,
        lambda: scored(reported, target_M),
        lambda: _unscored(len(tokens_M), num_logprobs),
    )
    noted_M = jnp.where(rows_M >= 0, rows_M, len(state.last_token))
    counts = all_R.change.counts.at[noted_M, target_M].add(1, mode="drop")
    state = SamplerState(
        last_token=state.last_token.at[noted_M].set(target_M, mode="drop"),
        rows=replace(all_R, change=replace(all_R.change, counts=counts)),
    )
    return Sampled(tokens_M, *found), state


@jax.named_scope("sampling")
def propose(
    logits_MV: jax.Array,
    state: SamplerState,
    proposals: Proposals,
    rows_M: jax.Array,
    positions_M: jax.Array,
    slots_M: jax.Array,
) -> tuple[jax.Array, SamplerState, Proposals]:
    """Choose what a draft model proposes, and note the distribution that it was drawn from.

    Args:
        logits_MV: float32, the draft model's.
        state: with the parameters of the model's own; may be donated.
        proposals: may be donated.
        rows_M: int32, row of each sample, none twice; -1 for padding.
        positions_M: int32, index in the sequence of the token to choose.
        slots_M: int32, which of its row's proposals it becomes.

    Returns:
        Tokens, int32 [M], -1 where the logits are not finite; and the new states.
    """
    samples, vocab_size = logits_MV.shape
    change, choice = state.rows.change, _choices(state.rows.choice, rows_M)
    mask_MW = jnp.asarray(full_mask(vocab_size, samples))
    x_MV = lax.cond(
        needs_processing(change, rows_M, mask_MW),
        lambda: process_logits(logits_MV, change, rows_M, mask_MW),
        lambda: logits_MV,
    )
    greedy_M, random_M = kernels.argmax(x_MV), choice.temperature > 0
    noted_M = jnp.where(rows_M >= 0, rows_M, len(state.last_token))

    def drawn() -> tuple[jax.Array, Proposals]:
        # Drawn from the weights as they are kept, so that the model has the exact odds.
        filters = _filters(choice)
        cut_MV = kernels.filter_logits(x_MV, filters)
        kept_MV = _weights(cut_MV, choice).astype(jnp.bfloat16)
        odds_MV = jnp.log(kept_MV.astype(jnp.float32)) * _scale(choice)[:, None]
        uniforms_M2 = _uniforms(choice, positions_M, 2, stream=_DRAFT)
        tokens_M = kernels.sample_tokens(odds_MV, uniforms_M2, _unfiltered(filters))
        return tokens_M, record(proposals, noted_M, slots_M, tokens_M, kept_MV)

    drawn_M, proposals = lax.cond(jnp.any(random_M), drawn, lambda: (greedy_M, proposals))
    tokens_M = jnp.where(random_M & (greedy_M >= 0), drawn_M, greedy_M)
    last_token = state.last_token.at[noted_M].set(jnp.maximum(tokens_M, 0), mode="drop")
    return tokens_M, replace(state, last_token=last_token), proposals


@jax.named_scope("logprobs")
def score(logits_MV: jax.Array, targets_M: jax.Array, k: int) -> Scored:
    """Log probabilities of the targets and of the k most likely tokens.

    Args:
        logits_MV: float32.
        targets_M: int32.
        k: how many tokens, at most V.
    """
    x_MGL, max_M = _in_lanes(logits_MV)
    norm_M = max_M + jnp.log(reductions.total(jnp.exp(x_MGL - max_M[:, None, None])))
    target_M1 = jnp.take_along_axis(logits_MV, targets_M[:, None], axis=1)
    ranks_M = 1 + jnp.sum(logits_MV > target_M1, axis=1, dtype=jnp.int32)
    top_MK, ids_MK = lax.top_k(logits_MV, k)
    return Scored(target_M1[:, 0] - norm_M, ranks_M, ids_MK, top_MK - norm_M[:, None])


def _in_lanes(x_MV: jax.Array) -> tuple[jax.Array, jax.Array]:
    x_MGL = reductions.split(x_MV, -jnp.inf)
    return x_MGL, reductions.maximum(x_MGL)


def _choices(all_R: DrawParams, rows_M: jax.Array) -> DrawParams:
    """How each sample is drawn; padding is greedy."""
    choice = jax.tree.map(lambda leaf_R: leaf_R[jnp.maximum(rows_M, 0)], all_R)
    return replace(choice, temperature=jnp.where(rows_M >= 0, choice.temperature, 0.0))


def _filters(choice: DrawParams) -> kernels.TokenFilters:
    return kernels.TokenFilters(choice.temperature, choice.top_k, choice.top_p, choice.min_p)


def _unfiltered(filters: kernels.TokenFilters) -> kernels.TokenFilters:
    """At the same temperature, among all tokens."""
    return kernels.TokenFilters(
        filters.temperature_M,
        jnp.full_like(filters.top_k_M, KEEP_ALL),
        jnp.ones_like(filters.top_p_M),
        jnp.zeros_like(filters.min_p_M),
    )


def _weights(x_MV: jax.Array, choice: DrawParams) -> jax.Array:
    """Of each token, 1 for the most likely one."""
    _, max_M = _in_lanes(x_MV)
    return jnp.exp((x_MV - max_M[:, None]) / _scale(choice)[:, None])


def _scale(choice: DrawParams) -> jax.Array:
    return jnp.where(choice.temperature > 0, choice.temperature, 1.0)


def _uniforms(
    choice: DrawParams, positions_M: jax.Array, count: int, *, stream: int | None = None
) -> jax.Array:
    """Uniform in [0, 1), float32 [M, count]; None is the stream of plain draws."""

    def one(key: jax.Array, position: jax.Array) -> jax.Array:
        bits = jax.random.fold_in(jax.random.wrap_key_data(key, impl="threefry2x32"), position)
        bits = bits if stream is None else jax.random.fold_in(bits, stream)
        return jax.random.uniform(bits, (count,))

    return jax.vmap(one)(choice.key, positions_M)


def _unscored(samples: int, k: int) -> Scored:
    zeros = jnp.zeros((samples, k))
    return Scored(jnp.zeros(samples), jnp.zeros(samples, jnp.int32), zeros.astype(jnp.int32), zeros)


def needs_processing(all_R: LogitParams, rows_M: jax.Array, mask_MW: jax.Array) -> jax.Array:
    """Whether `process_logits` would change anything in these samples; bool."""
    vocab_size = all_R.counts.shape[-1]
    changing_R = (all_R.presence != 0) | (all_R.frequency != 0) | (all_R.repetition != 1)
    changing_R |= all_R.bias_ids[:, 0] < vocab_size
    return jnp.any(mask_MW != ALL) | jnp.any(changing_R[rows_M] & (rows_M >= 0))


def process_logits(
    logits_MV: jax.Array, all_R: LogitParams, rows_M: jax.Array, mask_MW: jax.Array
) -> jax.Array:
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
