"""What requests say about their tokens and text holds for everything that is generated."""

import asyncio
import dataclasses
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from tests.integration.llm.helpers import Figures, prompts_of
from tests.integration.llm.streams import Service, ascii_tokens, collect, joined, make_service

from fornax.config.errors import EngineError
from fornax.llm import CompletionOutput, RequestOutputKind, SamplingParams
from fornax.llm.sampling_params import RepetitionDetectionParams, StructuredOutputsParams

PROMPTS = prompts_of(4, 19, 11, 30, 7, 2, 23, 13)
FREE = SamplingParams(temperature=1.0, max_tokens=30, output_kind=RequestOutputKind.DELTA)


@pytest.fixture(scope="module")
def figures() -> Figures:
    return Figures()


@pytest.fixture(scope="module")
def service(figures: Figures) -> Iterator[Service]:
    """No room for all rows of a test: some are preempted half way through their grammar."""
    service = make_service(figures, num_gpu_blocks_override=45)
    yield service
    service.engine.shutdown()
    assert not figures.compiled, "a program was compiled after the engine was ready"
    assert service.free_pages == service.pages, "pages were not given back"
    assert service.engine.error() is None


def outputs_of(service: Service, *each: SamplingParams) -> list[list[CompletionOutput]]:
    """The completions of prompts that run together, one for each of the params."""

    async def run() -> list[list[Any]]:
        pairs = zip(PROMPTS, each, strict=False)
        return await asyncio.gather(*(collect(service, p, params) for p, params in pairs))

    return [joined(deltas) for deltas in asyncio.run(run())]


def seeds(params: SamplingParams, count: int = 8) -> list[SamplingParams]:
    return [dataclasses.replace(params, seed=seed) for seed in range(count)]


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["cat", "dog"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "blue"]}, "maxItems": 3},
        "good": {"type": "boolean"},
    },
    "required": ["name", "age", "tags", "good"],
    "additionalProperties": False,
}
LIST = r"""
start: item ("," item)*
item: "cat" | "dog" | NUMBER
NUMBER: /[0-9]{1,3}/
"""


def _fits_schema(text: str) -> None:
    value = json.loads(text)
    assert sorted(value) == ["age", "good", "name", "tags"]
    assert value["name"] in ("cat", "dog")
    assert type(value["age"]) is int
    assert 0 <= value["age"] <= 120
    assert set(value["tags"]) <= {"red", "blue"}
    assert len(value["tags"]) <= 3
    assert type(value["good"]) is bool


def _fits(pattern: str) -> Any:
    def check(text: str) -> None:
        assert re.fullmatch(pattern, text), text

    return check


CONSTRAINTS = {
    "schema": ({"json": SCHEMA, "disable_any_whitespace": True}, _fits_schema),
    "regex": ({"regex": r"[a-c]{2,5}-(yes|no)[0-9]{3}"}, _fits(r"[a-c]{2,5}-(yes|no)[0-9]{3}")),
    "choice": ({"choice": ["the cat", "the dog", "né"]}, _fits("the cat|the dog|né")),
    "grammar": ({"grammar": LIST}, _fits(r"(cat|dog|\d{1,3})(,(cat|dog|\d{1,3}))*")),
    "unicode": ({"regex": "(é|日本){2,4}!"}, _fits("(é|日本){2,4}!")),
}


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_structured_text_is_always_valid(name: str, service: Service) -> None:
    constraint, check = CONSTRAINTS[name]
    params = dataclasses.replace(
        FREE, max_tokens=110, structured_outputs=StructuredOutputsParams(**constraint)
    )
    ended = 0
    for [output] in outputs_of(service, *seeds(params)):
        assert output.finish_reason in ("stop", "length")
        if output.finish_reason == "stop":
            check(output.text)
            ended += 1
    assert ended >= 6, "hardly any text came to its end"


def test_rows_that_were_preempted_go_on_in_their_grammar(
    service: Service, figures: Figures
) -> None:
    before = figures.preemptions
    words = StructuredOutputsParams(regex="(cat[0-9]|dog[a-f]){20}!")
    params = dataclasses.replace(FREE, max_tokens=110, structured_outputs=words)
    for [output] in outputs_of(service, *seeds(params)):
        assert output.finish_reason == "stop"
        assert re.fullmatch("(cat[0-9]|dog[a-f]){20}!", output.text)
    assert figures.preemptions > before, "the cache was large enough for all"


def test_any_json_object(service: Service) -> None:
    objects = StructuredOutputsParams(json_object=True)
    params = dataclasses.replace(FREE, max_tokens=60, structured_outputs=objects)
    for [output] in outputs_of(service, *seeds(params)):
        assert output.text.lstrip(" \n\r\t").startswith("{")
        if output.finish_reason == "stop":
            assert isinstance(json.loads(output.text), dict)


def test_each_of_several_completions_follows_the_constraint_by_itself(service: Service) -> None:
    words = StructuredOutputsParams(regex="(cat|dog|red|blue){3,4}")
    params = dataclasses.replace(FREE, max_tokens=40, n=4, seed=1, structured_outputs=words)
    [outputs, free] = outputs_of(service, params, dataclasses.replace(FREE, max_tokens=40))
    assert len({output.text for output in outputs}) > 1
    for output in outputs:
        assert output.finish_reason == "stop"
        assert re.fullmatch("(cat|dog|red|blue){3,4}", output.text)
    assert free[0].token_ids


def test_greedy_and_constrained_rows_do_not_disturb_each_other(service: Service) -> None:
    plain = dataclasses.replace(FREE, temperature=0.0, ignore_eos=True)
    choice = StructuredOutputsParams(choice=["one two three four five six seven"])
    told = dataclasses.replace(FREE, temperature=0.0, structured_outputs=choice)
    [alone] = outputs_of(service, plain)
    [[beside], [spoken]] = outputs_of(service, plain, told)
    assert beside == alone[0]
    assert spoken.text == "one two three four five six seven"


@pytest.mark.parametrize(
    "constraint",
    [{"json": {"type": "nothing"}}, {"regex": "(["}, {"grammar": "start: missing"}],
    ids=str,
)
def test_impossible_constraints_are_refused(constraint: Any, service: Service) -> None:
    params = dataclasses.replace(FREE, structured_outputs=StructuredOutputsParams(**constraint))
    with pytest.raises(EngineError, match="structured_outputs"):
        asyncio.run(collect(service, [1, 2], params))


def test_constraints_that_leave_no_token_fail_their_request_only(service: Service) -> None:
    digits = StructuredOutputsParams(regex="[0-9]{9}")
    [letter] = service.tokenizer.encode("x").tolist()
    none = dataclasses.replace(FREE, structured_outputs=digits, allowed_token_ids=[letter])

    async def run() -> list[Any]:
        both = (collect(service, [1, 2], none), collect(service, [3, 4, 5], FREE))
        return await asyncio.gather(*both, return_exceptions=True)

    refused, fine = asyncio.run(run())
    assert isinstance(refused, EngineError)
    assert "no token" in str(refused)
    assert fine[-1].finished


def test_only_allowed_tokens_are_chosen(service: Service) -> None:
    allowed = (5, 40, 41, 300)
    params = dataclasses.replace(FREE, allowed_token_ids=allowed, ignore_eos=True)
    for [output] in outputs_of(service, *seeds(params)):
        assert set(output.token_ids) <= set(allowed)
        assert len(output.token_ids) == 30


def test_bias_makes_tokens_certain_or_impossible(service: Service) -> None:
    certain = dataclasses.replace(FREE, logit_bias={77: 100.0}, temperature=0.5)
    [[output]] = outputs_of(service, certain)
    assert output.token_ids == [77] * 30
    [[greedy]] = outputs_of(service, dataclasses.replace(FREE, temperature=0.0))
    banned = dict.fromkeys(greedy.token_ids, -100.0)
    [[other]] = outputs_of(service, dataclasses.replace(FREE, temperature=0.0, logit_bias=banned))
    assert not set(other.token_ids) & set(greedy.token_ids)


def test_bad_words_never_come(service: Service) -> None:
    letters = [service.tokenizer.encode(letter).tolist()[0] for letter in "abc"]
    few = dataclasses.replace(FREE, allowed_token_ids=letters, max_tokens=60)
    assert any("ab" in output.text for [output] in outputs_of(service, *seeds(few)))
    for words in (["ab"], ["abc", "ca"], ["a"]):
        params = dataclasses.replace(few, bad_words=words)
        for [output] in outputs_of(service, *seeds(params)):
            assert len(output.text) == 60
            assert not any(word in output.text for word in words)


def test_stop_strings_across_tokens_end_the_text_before_them(service: Service) -> None:
    letters = [service.tokenizer.encode(letter).tolist()[0] for letter in "abc"]
    free = dataclasses.replace(FREE, allowed_token_ids=letters, max_tokens=60)
    stopped = dataclasses.replace(free, stop=["abca", "cc"])
    kept = dataclasses.replace(stopped, include_stop_str_in_output=True)
    for seed in range(5):
        each = [dataclasses.replace(one, seed=seed) for one in (free, stopped, kept)]
        each = [dataclasses.replace(one, skip_reading_prefix_cache=True) for one in each]

        async def run(each: list[SamplingParams] = each) -> list[Any]:
            return await asyncio.gather(*(collect(service, PROMPTS[0], one) for one in each))

        whole, cut, with_it = (joined(deltas)[0] for deltas in asyncio.run(run()))
        found = re.search("abca|cc", whole.text)
        assert found, "the stop strings never came up"
        assert cut.finish_reason == "stop"
        assert cut.stop_reason == found[0]
        assert cut.text == whole.text[: found.start()]
        assert with_it.text == whole.text[: found.end()]
        assert cut.token_ids == whole.token_ids[: found.end()]


def test_no_end_before_min_tokens(service: Service) -> None:
    eos = service.tokenizer.eos_id
    assert eos is not None
    eager = dataclasses.replace(FREE, logit_bias={eos: 100.0})
    [[at_once]] = outputs_of(service, eager)
    assert (at_once.token_ids, at_once.text, at_once.finish_reason) == ([eos], "", "stop")
    [[later]] = outputs_of(service, dataclasses.replace(eager, min_tokens=7))
    assert len(later.token_ids) == 8
    assert later.token_ids.index(eos) == 7
    on = dataclasses.replace(eager, ignore_eos=True, stop_token_ids=[44], max_tokens=9)
    [[ignored]] = outputs_of(service, on)
    assert ignored.token_ids == [eos] * 9
    assert ignored.finish_reason == "length"
    stop = dataclasses.replace(FREE, logit_bias={44: 100.0}, stop_token_ids=[44], min_tokens=3)
    [[stopped]] = outputs_of(service, stop)
    assert (len(stopped.token_ids), stopped.stop_reason) == (4, 44)


def test_a_completion_that_repeats_itself_is_ended(service: Service) -> None:
    repeats = RepetitionDetectionParams(max_pattern_size=3, min_count=4)
    params = dataclasses.replace(
        FREE, allowed_token_ids=[50], ignore_eos=True, repetition_detection=repeats
    )
    [[output]] = outputs_of(service, params)
    assert output.finish_reason == "repetition"
    assert len(output.token_ids) == 4


def test_a_trace_is_replayed_with_its_log_probabilities(service: Service) -> None:
    trace = [int(token) for token in ascii_tokens()[:12]]
    params = dataclasses.replace(FREE, trace_decode_token_ids=trace, max_tokens=12, logprobs=0)
    [[output]] = outputs_of(service, params)
    assert output.token_ids == trace
    assert output.logprobs is not None
    assert [list(entry) for entry in output.logprobs] == [[token] for token in trace]
    assert len({entry[t].rank for entry, t in zip(output.logprobs, trace, strict=True)}) > 3
