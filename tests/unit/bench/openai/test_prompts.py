"""Prompts: drawn at random, read from files, rebuilt from a trace."""

import asyncio
import json

import pytest

from fornax.bench import BenchConfig, Request
from fornax.bench.openai.prompts import make_requests
from fornax.config import ConfigError, DataError


class Words:
    """A vocabulary whose tokens are numbers written with blanks between."""

    ids = range(1000, 2000)

    async def encode(self, text: str) -> list[int]:
        return [len(word) for word in text.split()]

    async def decode(self, tokens) -> str:
        return " ".join(map(str, tokens))


def make(context: int | None = None, **settings) -> list[Request]:
    return asyncio.run(make_requests(BenchConfig(**settings), Words(), context))


def file_of(tmp_path, *rows: object, name: str = "rows.jsonl"):
    path = tmp_path / name
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_random_lengths_lie_in_their_range():
    made = make(num_prompts=300, random_input_len=20, random_output_len=10, random_range_ratio=0.5)
    inputs, outputs = (
        {getattr(r, name) for r in made} for name in ("prompt_tokens", "output_tokens")
    )
    assert (min(inputs), max(inputs)) == (10, 30)
    assert (min(outputs), max(outputs)) == (5, 15)
    assert all(len(r.prompt) == r.prompt_tokens for r in made)
    assert all(token in Words.ids for r in made for token in r.prompt)


def test_a_shared_prefix_is_shared():
    made = make(num_prompts=5, random_prefix_len=8, random_input_len=4)
    assert len({tuple(r.prompt[:8]) for r in made}) == 1
    assert len({tuple(r.prompt[8:]) for r in made}) == 5
    assert made[0].prompt_tokens == 12


@pytest.mark.parametrize(
    ("context", "chosen", "lengths"),
    [
        (None, {}, (1024, 128)),
        (4096, {}, (1024, 128)),
        (256, {}, (192, 64)),
        (256, {"random_input_len": 200}, (200, 56)),
        (256, {"random_output_len": 16}, (240, 16)),
        (256, {"random_prefix_len": 100}, (117, 39)),
        (256, {"input_len": 300, "output_len": 7}, (300, 7)),
    ],
)
def test_lengths_nobody_chose_fit_the_context(context, chosen, lengths):
    (made,) = make(context, num_prompts=1, **chosen)
    prefix = chosen.get("random_prefix_len", 0)
    assert (made.prompt_tokens - prefix, made.output_tokens) == lengths


def test_a_trace_keeps_lengths_and_shared_prefixes(tmp_path):
    rows = [
        {"timestamp": 2.0, "input_length": 40, "output_length": 3, "hash_ids": [1, 2]},
        {"timestamp": 1.0, "input_length": 20, "output_length": 4, "hash_ids": [1, 5]},
        {"timestamp": 3.0, "input_length": 7, "output_length": 5},
    ]
    made = make(dataset_name="timed_trace", dataset_path=file_of(tmp_path, *rows), num_prompts=9)
    assert [r.timestamp for r in made] == [1.0, 2.0, 3.0]
    assert [(r.prompt_tokens, r.output_tokens) for r in made] == [(20, 4), (40, 3), (7, 5)]
    short, long, _ = (r.prompt for r in made)
    assert short[:16] == long[:16]
    assert short[16:] != long[16:20]


def test_conversations_give_the_first_question_and_the_length_of_its_answer(tmp_path):
    def talk(*texts: str) -> dict:
        return {"conversations": [{"from": "x", "value": text} for text in texts]}

    good = talk("a b c d e", "f g h i j k", "later")
    rows = [good, talk("too short", "a b c d"), talk("alone in here it is"), {}]
    whole = tmp_path / "list.json"
    whole.write_text(json.dumps(rows))
    for path in (file_of(tmp_path, *rows), whole):
        made = make(dataset_name="sharegpt", dataset_path=path, num_prompts=9, no_oversample=True)
        assert made == [Request(prompt="a b c d e", prompt_tokens=5, output_tokens=6)]


def test_custom_prompts_repeat_until_there_are_enough(tmp_path):
    path = file_of(tmp_path, {"prompt": "a b", "output_tokens": 5}, {"prompt": "c"})
    made = make(dataset_name="custom", dataset_path=path, num_prompts=5, disable_shuffle=True)
    assert [r.prompt for r in made] == ["a b", "c", "a b", "c", "a b"]
    assert [r.output_tokens for r in made[:2]] == [5, 256]


def test_shuffling_is_seeded(tmp_path):
    path = file_of(tmp_path, *({"prompt": f"p{n}"} for n in range(50)))
    one, two, other = (
        [r.prompt for r in make(dataset_name="custom", dataset_path=path, num_prompts=20, seed=s)]
        for s in (1, 1, 2)
    )
    assert one == two != other


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        ("", "custom", "no request in it"),
        ("{", "custom", "line 1: not JSON"),
        ("[1]\n", "sharegpt", "JSON objects belong"),
        ('{"text": 1}', "custom", "no text under 'prompt'"),
        ('{"input_length": 0, "output_length": 1}', "timed_trace", "input_length=0"),
        ('{"input_length": 3}', "timed_trace", "output_length=None"),
    ],
)
def test_what_is_no_dataset_is_named(tmp_path, content, name, message):
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    with pytest.raises(DataError, match=message):
        make(dataset_name=name, dataset_path=path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_prompts": 0}, "num_prompts=0 must be at least 1"),
        ({"random_range_ratio": 1.0}, "below 1"),
        ({"request_rate": 0.0}, "above 0"),
        ({"request_rate": float("nan")}, "above 0"),
        ({"goodput": ("itl:5",)}, "not an objective"),
        ({"goodput": ("ttft:soon",)}, "not numbers"),
        ({"percentile_metrics": "ttft,latency"}, "'latency' is not a metric"),
        ({"metric_percentiles": "101"}, "at most 100"),
        ({"dataset_name": "custom"}, "needs a dataset_path"),
        ({"header": ("a",)}, "KEY=VALUE"),
        ({"ramp_up_start_rps": 1.0}, "need ramp_up_strategy"),
        ({"ramp_up_strategy": "linear"}, "needs ramp_up_start_rps"),
        ({"max_concurrency": 0}, "max_concurrency=0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        BenchConfig(**settings)
