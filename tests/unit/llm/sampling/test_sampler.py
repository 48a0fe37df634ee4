"""The sampler against float64 definitions, sample by sample.

Legend: M samples, V vocabulary, R rows.
"""

import jax
import numpy as np
import pytest

from fornax.llm.sampling.masks import mask_words, token_mask
from fornax.llm.sampling.sampler import sample, score
from fornax.llm.sampling.state import RowParams, init_sampler_state, load_row
from fornax.llm.sampling_params import SamplingParams

V, R, K = 613, 6, 5
LOAD = jax.jit(load_row)
SCORE = jax.jit(score, static_argnums=2)
SAMPLE = jax.jit(sample, static_argnames=("num_logprobs", "logprobs_mode"))


def logits_of(samples, seed=0, scale=4.0, vocab=V):
    return (scale * np.random.default_rng(seed).normal(size=(samples, vocab))).astype(np.float32)


def everything(samples, vocab=V):
    return np.full((samples, mask_words(vocab)), 0xFFFFFFFF, np.uint32)


def state_of(rows, vocab=V, output=(), prompt=(), first_seed=0):
    """A state whose row i has the i-th parameters."""
    state = init_sampler_state(R, vocab)
    for row, params in enumerate(rows):
        made = RowParams.make(
            params,
            seed=first_seed + row,
            prompt=prompt,
            output=output,
            vocab_size=vocab,
        )
        state = LOAD(state, np.int32(row), made)
    return state


def run(logits, state, rows=None, positions=None, mask=None, want=False, **options):
    samples, vocab = logits.shape
    rows = np.arange(samples) if rows is None else rows
    positions = np.zeros(samples) if positions is None else positions
    return SAMPLE(
        logits,
        state,
        np.asarray(rows, np.int32),
        np.asarray(positions, np.int32),
        everything(samples, vocab) if mask is None else mask,
        num_logprobs=min(K, vocab),
        want_logprobs=np.bool_(want),
        **options,
    )


def kept_by_definition(logits, params):
    """Tokens that may be drawn, by sorting in float64."""
    x = logits.astype(np.float64) / params.temperature
    p = np.exp(x - x.max())
    kept = p >= params.min_p
    if params.top_k:
        kept &= x >= np.sort(x[kept])[::-1][: params.top_k][-1]
    p = np.where(kept, p, 0) / p[kept].sum()
    order = np.argsort(-p)
    above = np.cumsum(p[order]) - p[order]
    return set(order[(above < params.top_p) & (p[order] > 0)].tolist())


@pytest.mark.slow
def test_greedy_takes_the_first_of_the_highest():
    logits = logits_of(3)
    logits[1, [40, 20, 600]] = 50.0
    out, state = run(logits, state_of([SamplingParams(temperature=0.0)] * 3))
    assert out.tokens.tolist() == [logits[0].argmax(), 20, logits[2].argmax()]
    assert state.last_token.tolist()[:3] == out.tokens.tolist()


@pytest.mark.parametrize("vocab", [1, 31, 256, 257, 1000])
def test_any_size_of_vocabulary(vocab):
    logits = logits_of(2, vocab=vocab)
    params = [SamplingParams(temperature=0), SamplingParams(top_k=1)]
    out, _ = run(logits, state_of(params, vocab), want=True)
    assert out.tokens.tolist() == logits.argmax(1).tolist()


def row_of(params, vocab):
    return RowParams.make(params, seed=0, prompt=(), output=(), vocab_size=vocab)


def probabilities(logits, params):
    x = logits.astype(np.float64) / params.temperature
    p = np.exp(x - x.max())
    kept = np.zeros(len(p), bool)
    kept[list(kept_by_definition(logits, params))] = True
    return np.where(kept, p, 0) / p[kept].sum()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(top_k=12),
        SamplingParams(top_p=0.8),
        SamplingParams(temperature=0.5),
    ],
)
def test_draws_follow_the_distribution(params):
    logits = logits_of(1, scale=1.5, vocab=40)[0]
    count = 20_000
    state = state_of([params], 40)
    out, _ = run(
        np.tile(logits[None], (count, 1)),
        state,
        rows=np.zeros(count),
        positions=np.arange(count),
    )
    tokens = np.asarray(out.tokens)
    p = probabilities(logits, params)
    found = np.bincount(tokens, minlength=40)
    assert not found[p == 0].any()
    likely = p * count >= 5
    # Rare tokens count as one cell.
    expected = np.append(p[likely], p[~likely].sum()) * count
    seen = np.append(found[likely], found[~likely].sum())
    cells = expected > 0
    statistic = ((seen - expected)[cells] ** 2 / expected[cells]).sum()
    freedom = cells.sum() - 1
    assert statistic < freedom + 4 * np.sqrt(2 * freedom) + 4


@pytest.mark.slow
def test_a_seeded_draw_is_the_same_whatever_runs_beside_it():
    params = SamplingParams(temperature=0.9, top_p=0.9, seed=3)
    logits = logits_of(1, scale=2.0)
    alone, _ = run(logits, state_of([params], first_seed=11), positions=[77])
    others = [SamplingParams(temperature=0), SamplingParams(top_k=400), SamplingParams()]
    beside = [*others, params, SamplingParams(min_p=0.2), SamplingParams(presence_penalty=1.0)]
    state = state_of(beside, first_seed=8)
    many = np.concatenate([logits_of(3, seed=9), logits, logits_of(2, seed=10)])
    together, _ = run(many, state, positions=[5, 6, 7, 77, 8, 9])
    assert together.tokens[3] == alone.tokens[0]
    # The row and the place among the samples do not matter either.
    order = [5, 3, 0, 1, 2, 4]
    moved, _ = run(many[order], state, rows=order, positions=np.array([5, 6, 7, 77, 8, 9])[order])
    assert moved.tokens[1] == alone.tokens[0]


def test_seed_and_position_alone_give_the_random_bits():
    params = SamplingParams()
    flat = np.zeros((R, V), np.float32)
    out, _ = run(flat, state_of([params] * R), positions=[4] * R)
    again, _ = run(flat, state_of([params] * R), positions=[4] * R)
    assert out.tokens.tolist() == again.tokens.tolist()
    assert len(set(out.tokens.tolist())) > R // 2
    same_seed = state_of([params])
    other, _ = run(flat[:3], same_seed, rows=[0, 0, 0], positions=[4, 5, 4])
    assert other.tokens[0] == other.tokens[2] == out.tokens[0]
    assert other.tokens[0] != other.tokens[1]
    large, _ = run(flat[:1], state_of([params], first_seed=1 << 32), positions=[4])
    assert large.tokens[0] != out.tokens[0]


def test_mask_forbids_what_it_leaves_out():
    logits = logits_of(2)
    allowed = [3, 64, 612]
    mask = everything(2)
    mask[0] = token_mask(allowed, V)
    out, _ = run(logits, state_of([SamplingParams(temperature=0)] * 2), mask=mask)
    assert out.tokens.tolist() == [max(allowed, key=lambda t: logits[0, t]), logits[1].argmax()]
    mask[1] = token_mask([7, 600], V)
    for position in range(20):
        out, _ = run(
            logits, state_of([SamplingParams()] * 2), mask=mask, positions=[position, position]
        )
        assert out.tokens[0] in allowed
        assert out.tokens[1] in (7, 600)


def test_bias_is_added():
    logits = logits_of(2)
    params = SamplingParams(temperature=0, logit_bias={17: 100.0, int(logits[1].argmax()): -100.0})
    out, _ = run(logits, state_of([params, params]))
    assert out.tokens[0] == 17
    assert out.tokens[1] == 17
    second = SamplingParams(temperature=0, logit_bias={int(logits[1].argmax()): -100.0})
    out, _ = run(logits, state_of([params, second]))
    assert out.tokens[1] == np.argsort(logits[1])[-2]


def penalized_by_definition(logits, params, prompt, output):
    x = logits.astype(np.float64)
    for token in set(prompt) | set(output):
        factor = params.repetition_penalty
        x[token] = x[token] / factor if x[token] > 0 else x[token] * factor
    for token in set(output):
        x[token] -= params.presence_penalty + params.frequency_penalty * output.count(token)
    return x


@pytest.mark.parametrize(
    "given",
    [{"presence_penalty": 1.5}, {"frequency_penalty": 0.7}, {"repetition_penalty": 1.8}],
)
def test_penalties_follow_what_was_generated(given):
    params = SamplingParams(temperature=0, **given)
    logits = logits_of(1, scale=1.0)[0]
    best = np.argsort(-logits)[:30].tolist()
    prompt, output = best[2:5], [best[0], best[0], best[7]]
    state = state_of([params], output=output, prompt=prompt)
    for step in range(12):
        expected = penalized_by_definition(logits, params, prompt, output).argmax()
        out, state = run(logits[None], state, positions=[step])
        assert out.tokens[0] == expected
        output = [*output, int(expected)]


def test_a_row_loaded_again_forgets_its_last_sequence():
    params = SamplingParams(temperature=0, presence_penalty=2.0)
    logits = logits_of(1, scale=0.1)
    state = state_of([params])
    first, state = run(logits, state)
    second, state = run(logits, state)
    assert second.tokens[0] != first.tokens[0]
    state = LOAD(state, np.int32(0), row_of(params, V))
    assert run(logits, state)[0].tokens[0] == first.tokens[0]


def test_padding_changes_no_row():
    state = state_of([SamplingParams(temperature=0, presence_penalty=1.0)] * 2)
    _, after = run(logits_of(2), state, rows=[1, -1])
    assert after.last_token[0] == state.last_token[0]
    assert not after.rows.change.counts[0].any()
    assert after.rows.change.counts[1].sum() == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_broken_logits_are_reported_for_their_row_only(temperature, value):
    logits = logits_of(3)
    logits[1, 100] = value
    state = state_of([SamplingParams(temperature=temperature)] * 3)
    out, state = run(logits, state)
    assert out.tokens[1] == -1
    assert out.tokens[0] >= 0
    assert out.tokens[2] >= 0
    assert state.last_token[1] == 0


def test_nothing_allowed_is_reported():
    mask = everything(2)
    mask[0] = 0
    out, _ = run(logits_of(2), state_of([SamplingParams()] * 2), mask=mask)
    assert out.tokens[0] == -1
    assert out.tokens[1] >= 0


def test_logprobs_are_of_the_model_and_ranks_count_from_one():
    logits = logits_of(3)
    exact = logits.astype(np.float64)
    exact -= np.log(np.exp(exact).sum(1, keepdims=True))
    params = SamplingParams(temperature=0.3, top_k=50, logit_bias={4: 100.0})
    state = state_of([params] * 3)
    out, _ = run(logits, state, want=True)
    assert out.tokens.tolist() == [4, 4, 4]
    np.testing.assert_allclose(out.logprobs, exact[:, 4], rtol=1e-6, atol=1e-5)
    assert out.ranks.tolist() == (1 + (logits > logits[:, 4:5]).sum(1)).tolist()
    order = np.argsort(-logits, axis=1)[:, :K]
    assert out.top_ids.tolist() == order.tolist()
    expected = np.take_along_axis(exact, order, 1)
    np.testing.assert_allclose(out.top_logprobs, expected, rtol=1e-6, atol=1e-5)


def test_scores_of_given_targets():
    logits = logits_of(4)
    targets = np.array([0, 5, V - 1, int(logits[3].argmax())], np.int32)
    scored = SCORE(logits, targets, 3)
    exact = logits.astype(np.float64)
    exact -= np.log(np.exp(exact).sum(1, keepdims=True))
    np.testing.assert_allclose(scored.logprobs, exact[range(4), targets], rtol=1e-6, atol=1e-5)
    assert scored.ranks[3] == 1
    assert scored.top_ids.shape == (4, 3)


def test_sums_do_not_depend_on_the_number_of_rows():
    logits = logits_of(32, vocab=32000)
    whole = SCORE(logits, np.zeros(32, np.int32), 5)
    for rows in (1, 2, 7):
        part = SCORE(logits[:rows], np.zeros(rows, np.int32), 5)
        assert np.array_equal(part.logprobs, whole.logprobs[:rows])
        assert np.array_equal(part.top_logprobs, whole.top_logprobs[:rows])


def log_softmax(x):
    """In float64; the last axis."""
    x = x.astype(np.float64) - x.max()
    return x - np.log(np.exp(x).sum())


@pytest.mark.parametrize("mode", ["scaled_logprobs", "processed_logprobs"])
def test_logprobs_are_of_the_distribution_that_tokens_are_drawn_from(mode):
    params = [
        SamplingParams(temperature=0.5, top_k=7, logit_bias={3: 2.0}),
        SamplingParams(temperature=1.7, top_p=0.6, repetition_penalty=1.3),
        SamplingParams(temperature=1.0, min_p=0.05),
        SamplingParams(temperature=1.3),
        SamplingParams(temperature=0.0, top_k=2),
    ]
    logits = logits_of(5, scale=3.0)
    out, _ = run(logits, state_of(params, prompt=(5, 6)), want=True, logprobs_mode=mode)
    for row, one in enumerate(params):
        x = logits[row].astype(np.float64)
        if row == 0:
            x[3] += 2.0
        if row == 1:
            x[[5, 6]] = np.where(x[[5, 6]] > 0, x[[5, 6]] / 1.3, x[[5, 6]] * 1.3)
        if mode == "processed_logprobs" and not one.greedy:
            kept = list(kept_by_definition(x, one))
            x[np.setdiff1d(np.arange(V), kept)] = -np.inf
        expected = log_softmax(x / (one.temperature or 1.0))
        token = out.tokens[row]
        np.testing.assert_allclose(out.logprobs[row], expected[token], atol=2e-6)
        assert out.ranks[row] == 1 + (expected > expected[token]).sum()
        np.testing.assert_allclose(out.top_logprobs[row], np.sort(expected)[::-1][:K], atol=2e-6)
