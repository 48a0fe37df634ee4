"""Speculative sampling: exact in distribution, and as often agreed as can be.

Legend: M samples, V vocabulary, R rows, A places ahead.
"""

import jax
import numpy as np
import pytest
from tests.unit.llm.sampling.test_sampler import (
    SAMPLE,
    everything,
    kept_by_definition,
    probabilities,
)

from fornax.llm.sampling.rejection import init_proposals
from fornax.llm.sampling.sampler import propose
from fornax.llm.sampling.state import RowParams, SamplerState
from fornax.llm.sampling_params import SamplingParams

R, A = 250, 3
PROPOSE = jax.jit(propose)


def pair_of(vocab, noise, seed=0):
    """Logits of a model and of a draft that differs by noise, float32 [V]."""
    rng = np.random.default_rng(seed)
    logits = 2 * rng.normal(size=vocab)
    return (logits.astype(np.float32), (logits + noise * rng.normal(size=vocab)).astype(np.float32))


def state_of(params, vocab):
    row = RowParams.make(params, seed=7, prompt=(), output=(), vocab_size=vocab)
    rows = jax.tree.map(lambda x: np.broadcast_to(np.asarray(x), (R, *np.shape(x))), row)
    return SamplerState(last_token=np.zeros(R, np.int32), rows=rows)


def speculate(logits, draft, params, count):
    """What the draft proposed and what the model made of it, int32 [count] each."""
    vocab = len(logits)
    state, proposals = state_of(params, vocab), init_proposals(R, A, vocab)
    rows = np.arange(R, dtype=np.int32)
    proposed, sampled = [], []
    for first in range(0, count, R):
        positions = (first + rows).astype(np.int32)
        places = np.tile(draft, (R, 1)), state, proposals, rows, positions, positions % A
        tokens, _, proposals = PROPOSE(*places)
        out, _ = SAMPLE(
            np.tile(logits, (R, 1)),
            state,
            rows,
            positions,
            everything(R, vocab),
            num_logprobs=1,
            want_logprobs=np.bool_(False),
            proposals=proposals,
            slots_M=positions % A,
        )
        proposed.append(np.asarray(tokens))
        sampled.append(np.asarray(out.tokens))
    return np.concatenate(proposed), np.concatenate(sampled)


def chi_square(tokens, p):
    """How far counts are from expected ones, in standard deviations of the statistic."""
    found, expected = np.bincount(tokens, minlength=len(p)), p * len(tokens)
    assert not found[p == 0].any()
    likely = expected >= 5
    # Rare tokens count as one cell.
    seen = np.append(found[likely], found[~likely].sum())
    expected = np.append(expected[likely], expected[~likely].sum())
    cells = expected > 0
    statistic = ((seen - expected)[cells] ** 2 / expected[cells]).sum()
    freedom = cells.sum() - 1
    return (statistic - freedom) / np.sqrt(2 * freedom)


@pytest.mark.parametrize("noise", [0.0, 0.5, 3.0])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.5),
        SamplingParams(temperature=1.5, top_p=0.8),
        SamplingParams(temperature=0.8, top_k=12),
        SamplingParams(min_p=0.05, logit_bias={3: 1.5}),
    ],
)
def test_what_comes_out_is_distributed_as_the_model_says(params, noise):
    logits, draft = pair_of(40, noise)
    proposed, sampled = speculate(logits, draft, params, 10_000)
    for bias, value in (params.logit_bias or {}).items():
        logits[bias] += value
        draft[bias] += value
    assert chi_square(sampled, probabilities(logits, params)) < 5
    assert chi_square(proposed, probabilities(draft, params)) < 5


@pytest.mark.parametrize("noise", [0.15, 0.5, 1.0])
def test_the_draft_is_kept_as_often_as_can_be(noise):
    """No scheme agrees more often than one minus the total variation distance."""
    logits, draft = pair_of(1000, noise)
    params = SamplingParams()
    proposed, sampled = speculate(logits, draft, params, 4000)
    limit = np.minimum(probabilities(logits, params), probabilities(draft, params)).sum()
    agreed = (proposed == sampled).mean()
    assert abs(agreed - limit) < 4 * np.sqrt(limit * (1 - limit) / len(sampled))


@pytest.mark.slow
def test_a_draft_that_keeps_other_tokens_is_corrected():
    """Filters may leave nothing that both keep."""
    logits, draft = np.zeros((2, 300), np.float32)
    logits[:5], draft[200:205] = 9.0, 9.0
    params = SamplingParams(top_k=5)
    proposed, sampled = speculate(logits, draft, params, 2 * R)
    assert set(proposed.tolist()) <= set(range(200, 205))
    assert set(sampled.tolist()) == kept_by_definition(logits, params)


@pytest.mark.slow
def test_greedy_takes_the_most_likely_whatever_is_proposed():
    logits, draft = pair_of(600, 2.0)
    proposed, sampled = speculate(logits, draft, SamplingParams(temperature=0), R)
    assert set(proposed.tolist()) == {draft.argmax()}
    assert set(sampled.tolist()) == {logits.argmax()}


@pytest.mark.slow
def test_without_a_proposal_the_draw_is_the_plain_one():
    logits, _ = pair_of(600, 0.0)
    state, positions = state_of(SamplingParams(), 600), np.arange(R, dtype=np.int32)
    common = {"num_logprobs": 1, "want_logprobs": np.bool_(False)}
    args = np.tile(logits, (R, 1)), state, positions, positions, everything(R, 600)
    plain, _ = SAMPLE(*args, **common)
    proposals, slots = init_proposals(R, A, 600), np.full(R, -1, np.int32)
    other, _ = SAMPLE(*args, **common, proposals=proposals, slots_M=slots)
    assert np.array_equal(plain.tokens, other.tokens)
    assert len(set(plain.tokens.tolist())) > 10
