"""Token masks: allowed ids, bad words of one and several tokens, min_tokens, traces, repetition."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fornax.config.errors import EngineError
from fornax.llm.request import RepetitionDetector
from fornax.llm.sampling.masks import TokenRules, bad_word_tokens, mask_words, token_mask
from fornax.llm.sampling_params import RepetitionDetectionParams, SamplingParams

V = 70


def tokens_of(mask):
    return {t for t in range(V) if mask[t // 32] >> (t % 32) & 1}


def rules(stop_ids=(), bad_words=(), **given):
    params = SamplingParams(**given)
    return TokenRules(params, stop_ids=stop_ids, bad_words=bad_words, vocab_size=V)


@given(st.lists(st.integers(0, V - 1)))
def test_mask_holds_exactly_the_tokens_given(tokens):
    mask = token_mask(tokens, V)
    assert mask.shape == (mask_words(V),)
    assert mask.dtype == np.uint32
    assert tokens_of(mask) == set(tokens)


def test_no_rules_need_no_mask():
    assert rules().apply([1, 2]) is None


def test_allowed_tokens_narrow_what_else_allows():
    some = rules(allowed_token_ids=[3, 33, 69])
    assert tokens_of(some.apply([])) == {3, 33, 69}
    assert tokens_of(some.apply([], token_mask([3, 4, 69], V))) == {3, 69}
    assert tokens_of(some.apply([])) == {3, 33, 69}


def test_stop_tokens_wait_for_min_tokens():
    some = rules(stop_ids=[2, 40], min_tokens=2)
    everything = set(range(V))
    assert tokens_of(some.apply([])) == everything - {2, 40}
    assert tokens_of(some.apply([1])) == everything - {2, 40}
    assert some.apply([1, 1]) is None


def test_bad_word_is_forbidden_where_it_would_be_completed():
    some = rules(bad_words=[[5], [6, 7, 8]])
    everything = set(range(V))
    assert tokens_of(some.apply([])) == everything - {5}
    assert tokens_of(some.apply([7])) == everything - {5}
    assert tokens_of(some.apply([1, 6, 7])) == everything - {5, 8}
    assert tokens_of(some.apply([6, 7, 1])) == everything - {5}


def test_trace_allows_its_next_token_only():
    some = rules(trace_decode_token_ids=[9, 64])
    assert tokens_of(some.apply([])) == {9}
    assert tokens_of(some.apply([9])) == {64}
    assert some.apply([9, 64]) is None


TOKENS = {"no": [1], " no": [2], "never": [3, 4], " never": [5, 6], "sum": [7], " sum": [8, 9]}


def test_bad_words_count_at_the_start_and_after_a_space():
    found = bad_word_tokens([" no", "never", "sum"], TOKENS.__getitem__, V)
    assert found == [[1], [2], [3, 4], [5, 6], [7]]


def test_bad_words_that_cannot_be_looked_for_are_refused():
    with pytest.raises(EngineError, match="at least one token"):
        bad_word_tokens(["x"], lambda text: [], V)
    with pytest.raises(EngineError, match="70"):
        bad_word_tokens(["x"], lambda text: [V], V)
    with pytest.raises(EngineError, match="fewer"):
        bad_word_tokens(["x"] * 1001, lambda text: [1], V)


def repeats_by_definition(tokens, params):
    for size in range(max(params.min_pattern_size, 1), params.max_pattern_size + 1):
        tail = tokens[-size * params.min_count :]
        if len(tail) == size * params.min_count and tail == tail[:size] * params.min_count:
            return True
    return False


@given(
    st.lists(st.integers(0, 1), max_size=14),
    st.integers(1, 4),
    st.integers(0, 4),
    st.integers(2, 4),
)
def test_repetition_is_found_as_defined(tokens, largest, smallest, count):
    params = RepetitionDetectionParams(
        max_pattern_size=largest, min_pattern_size=min(smallest, largest), min_count=count
    )
    detector = RepetitionDetector(params)
    for end, token in enumerate(tokens, start=1):
        assert detector.push(token) == repeats_by_definition(tokens[:end], params)
