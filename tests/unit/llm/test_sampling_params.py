"""Sampling parameters: what is accepted, what is refused, and that messages name the field."""

import math

import pytest

from fornax.config.errors import EngineError
from fornax.llm.sampling_params import (
    REFUSED,
    RepetitionDetectionParams,
    SamplingParams,
    StructuredOutputsParams,
)

OUT_OF_RANGE = [
    ("n", 0),
    ("n", 16385),
    ("n", 1.5),
    ("presence_penalty", 2.1),
    ("frequency_penalty", -2.1),
    ("repetition_penalty", 0),
    ("repetition_penalty", math.inf),
    ("temperature", -0.1),
    ("temperature", 2.5),
    ("temperature", math.nan),
    ("temperature", "hot"),
    ("top_p", 0.0),
    ("top_p", 1.1),
    ("top_p", math.nan),
    ("top_k", -2),
    ("top_k", 1.0),
    ("min_p", math.nan),
    ("seed", 2**63),
    ("stop", [""]),
    ("stop", [3]),
    ("stop", 3),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", ["a"]),
    ("stop_token_ids", "12"),
    ("max_tokens", 0),
    ("max_tokens", True),
    ("min_tokens", -1),
    ("min_tokens", 17),
    ("logprobs", -2),
    ("prompt_logprobs", -2),
    ("stream_interval", 0),
    ("bad_words", [""]),
    ("allowed_token_ids", []),
    ("logit_bias", {-1: 1.0}),
    ("logit_bias", {1: math.nan}),
    ("trace_decode_token_ids", []),
]


@pytest.mark.parametrize(("name", "value"), OUT_OF_RANGE)
def test_value_out_of_range_is_refused_by_name(name, value):
    with pytest.raises(EngineError, match=rf"^{name}"):
        SamplingParams(**{name: value})


UNSUPPORTED = {
    "prompt_logprob_token_ids": [1],
    "prompt_logprob_start": 3,
    "logprob_token_ids": [1],
    "flat_logprobs": True,
    "extra_args": {"a": 1},
    "thinking_token_budget": 5,
    "routed_experts_prompt_start": 1,
}


@pytest.mark.parametrize(("name", "value"), UNSUPPORTED.items())
def test_unsupported_field_is_refused_with_a_remedy(name, value):
    with pytest.raises(EngineError, match=rf"^{name}=.* is not supported; "):
        SamplingParams(**{name: value})


def test_every_unsupported_field_is_tried():
    assert set(UNSUPPORTED) == set(REFUSED)


def test_combinations_are_refused():
    with pytest.raises(EngineError, match=r"^n=2 must be 1 at temperature=0"):
        SamplingParams(n=2, temperature=0)
    with pytest.raises(EngineError, match=r"^stop=.*set detokenize=True"):
        SamplingParams(stop="x", detokenize=False)
    with pytest.raises(EngineError, match=r"^bad_words=.*trace_decode_token_ids"):
        SamplingParams(trace_decode_token_ids=[1], bad_words=["x"])


def test_given_values_are_normalized():
    params = SamplingParams(
        stop="end", stop_token_ids=[3, 3, 1], seed=-1, top_k=-1, logprobs=True, max_tokens=None
    )
    assert params.stop == ("end",)
    assert params.stop_token_ids == (3, 1)
    assert (params.seed, params.top_k, params.logprobs) == (None, 0, 1)


def test_prompt_logprobs_compute_the_whole_prompt():
    assert SamplingParams().reads_cache
    assert not SamplingParams(prompt_logprobs=0).reads_cache
    assert SamplingParams(prompt_logprobs=0, skip_reading_prefix_cache=False).reads_cache


def test_from_optional_takes_none_as_default_but_for_max_tokens():
    params = SamplingParams.from_optional(
        temperature=None, stop=None, max_tokens=None, logit_bias={"5": 300, "6": -1}
    )
    assert (params.temperature, params.stop, params.max_tokens) == (1.0, (), None)
    assert params.logit_bias == {5: 100.0, 6: -1.0}


def test_from_optional_refuses_unknown_names_and_bad_bias():
    with pytest.raises(EngineError, match="tempperature"):
        SamplingParams.from_optional(tempperature=1)
    with pytest.raises(EngineError, match=r"^logit_bias="):
        SamplingParams.from_optional(logit_bias={"a": 1})
    with pytest.raises(EngineError, match=r"^logit_bias"):
        SamplingParams.from_optional(logit_bias={"1": math.nan})


def test_message_does_not_repeat_a_huge_value():
    with pytest.raises(EngineError) as caught:
        SamplingParams(stop_token_ids=[-1] * 10000)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"stop_token_ids": [10]}, "stop_token_ids"),
        ({"allowed_token_ids": [3, 10]}, "allowed_token_ids"),
        ({"logit_bias": {10: 1.0}}, "logit_bias"),
        ({"logprobs": 6}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"prompt_logprobs": 6}, "prompt_logprobs"),
    ],
)
def test_model_limits_are_checked(given, name):
    params = SamplingParams(**given)
    with pytest.raises(EngineError, match=f"^{name}="):
        params.check_for_model(vocab_size=10, max_logprobs=5)


def test_all_logprobs_where_the_engine_allows_them():
    SamplingParams(logprobs=-1).check_for_model(vocab_size=10, max_logprobs=10)


def test_structured_outputs_take_exactly_one_constraint():
    StructuredOutputsParams(regex="a+")
    for given in ({}, {"regex": "a", "json": "{}"}, {"choice": []}, {"choice": "ab"}):
        with pytest.raises(EngineError):
            StructuredOutputsParams(**given)


def test_repetition_sizes_must_fit():
    RepetitionDetectionParams(max_pattern_size=4, min_count=3)
    for given in (
        {"max_pattern_size": 4},
        {"max_pattern_size": 2, "min_pattern_size": 3, "min_count": 2},
        {"max_pattern_size": -1},
    ):
        with pytest.raises(EngineError):
            RepetitionDetectionParams(**given)
