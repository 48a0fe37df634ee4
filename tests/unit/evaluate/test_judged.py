"""Figures and comparisons of judged completions, and the files they are written to."""

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fornax.config import from_mapping
from fornax.config.errors import ConfigError
from fornax.evaluate import EvaluateConfig, Results, compare
from fornax.evaluate.generative import Answered, judge_by_model, read_prompts, summarise
from fornax.evaluate.results import rows, write_files
from fornax.rewards import RewardSpec, Score
from fornax.tune.data import PromptTokens
from fornax.tune.rollout import Completion, SampleSettings

CONFIG = EvaluateConfig(
    model="a",
    against="b",
    prompts="p.jsonl",
    reward=("r.py:x", "r.py:y"),
    sampling=SampleSettings(n=2, temperature=1.0),
    k=(1, 2),
)


def _answered(*groups: Sequence[tuple[float, int]], prompt: Any = "<p>") -> list[Answered]:
    """Prompts with completions of (total reward, length)."""
    return [
        Answered(
            prompt=PromptTokens(tokens=np.zeros(2, np.int32), prompt=prompt, tools=None),
            completions=[_completion(length) for _, length in group],
            scores=[_score(total) for total, _ in group],
        )
        for group in groups
    ]


def _completion(length: int) -> Completion:
    return Completion(
        tokens=np.zeros(length, np.int32),
        logprobs=np.zeros(length, np.float32),
        versions=np.zeros(length, np.int32),
        mask=np.ones(length, np.int8),
        finish_reason="length" if length > 8 else "stop",
        text=f"<b>{length}",
        seed=0,
    )


def _score(total: float) -> Score:
    if total < 0:
        return Score(0.0, {"x": math.nan, "y": 0.0}, {"x": "took over 1 s"})
    return Score(total, {"x": total, "y": 0.0})


def test_what_a_reward_counts_is_shown_beside_it() -> None:
    [answered] = _answered([(1.0, 2), (0.0, 4)])
    scores = [Score(1.0, {"x": 1.0, "x.weak_tests": n}) for n in (0.0, 3.0)]
    found = summarise([dataclasses.replace(answered, scores=scores)], ["x"], CONFIG)
    assert {name: part.value for name, part in found.parts.items()} == {"x": 1, "x.weak_tests": 1.5}


def test_figures_of_judged_completions() -> None:
    answered = _answered([(1.0, 2), (0.0, 4)], [(-1.0, 9), (0.5, 9)])
    found = summarise(answered, ["x", "y"], CONFIG)
    assert (found.prompts, found.samples) == (2, 4)
    assert found.reward.value == pytest.approx((0.5 + 0.25) / 2)
    assert found.parts["x"].value == pytest.approx((0.5 + 0.5) / 2)
    assert found.failures == {"x": 1, "y": 0}
    assert {k: passed.value for k, passed in found.passes.items()} == {1: 0.25, 2: 0.5}
    assert found.tokens.value == 6.0
    assert found.truncated.value == 0.5


def test_scores_of_a_judge_pass_nothing() -> None:
    config = EvaluateConfig(model="a", prompts="p.jsonl", judge="runs/reward")
    assert summarise(_answered([(6.0, 2)]), [], config).passes == {}


def test_rewards_may_stand_in_a_file() -> None:
    found = from_mapping(
        EvaluateConfig,
        {
            "model": "a",
            "prompts": "p.jsonl",
            "reward": ["math", {"function": "r.py:x", "weight": 0.5, "options": {"a": "b"}}],
        },
    )
    assert found.rewards == (
        RewardSpec(function="math"),
        RewardSpec(function="r.py:x", weight=0.5, options={"a": "b"}),
    )


def test_a_comparison_counts_pairs_and_prompts() -> None:
    first = _answered([(1.0, 2), (1.0, 2)], [(0.0, 2), (1.0, 9)], [(0.0, 4), (0.0, 4)])
    second = _answered([(0.0, 4), (1.0, 4)], [(0.0, 2), (1.0, 2)], [(1.0, 8), (1.0, 8)])
    found = compare(first, second, CONFIG)
    assert (found.wins, found.ties, found.losses) == (1, 1, 1)
    assert found.win_rate.value == pytest.approx((0.75 + 0.5 + 0.0) / 3)
    assert found.difference.value == pytest.approx((0.5 + 0.0 - 1.0) / 3)
    assert found.tokens == pytest.approx((23 / 6, 28 / 6))
    assert found.longer_wins == pytest.approx((0 + 1 + 4) / 7)
    swapped = compare(second, first, CONFIG)
    assert swapped.win_rate.value == pytest.approx(1 - found.win_rate.value)
    assert swapped.longer_wins == found.longer_wins
    assert swapped.p_value == found.p_value == 1.0


class _Longest:
    def score(self, prompts: Sequence[Any], completions: Sequence[Any]) -> list[float]:
        return [
            len(p) + len(c[0]["content"] if isinstance(c, list) else c)
            for p, c in zip(prompts, completions, strict=True)
        ]


def test_a_judge_sees_text_or_messages_as_the_prompt_is() -> None:
    text = _answered([(0.0, 2), (0.0, 11)])
    chat = _answered([(0.0, 2)], prompt=[{"role": "user", "content": "q"}])
    for answered, expected in ((text, [3 + 4, 3 + 5]), (chat, [1 + 4])):
        prompts = [each.prompt for each in answered]
        found = judge_by_model(prompts, [each.completions for each in answered], _Longest())
        assert [score.total for score in found[0].scores] == expected
        assert found[0].scores[0].parts == {"judge": expected[0]}


def test_results_as_a_table_and_as_files(tmp_path: Path) -> None:
    first, second = _answered([(1.0, 2), (-1.0, 3)]), _answered([(0.0, 9), (0.0, 3)])
    results = Results(
        config=CONFIG,
        generative={
            "a": summarise(first, ["x", "y"], CONFIG),
            "b": summarise(second, ["x", "y"], CONFIG),
        },
        comparison=compare(first, second, CONFIG),
        tasks={
            "a": {"results": {"arc": {"alias": "arc", "acc,none": 0.5, "acc_stderr,none": 0.25}}}
        },
        answers={"a": first, "b": second},
    )
    shown = {(model, measure): (value, note) for model, measure, value, note in rows(results)}
    assert shown["a", "pass@1"] == ("0.5", "total reward 1 or more")
    assert shown["a", "reward/x"] == ("1", "failed on 1 completions")
    assert shown["a", "arc acc"][0] == "0.5 ± 0.25"
    assert shown["a against b", "win rate"][1].startswith("1 won, 0 tied, 0 lost of 1 prompts")
    write_files(results, tmp_path)
    found = json.loads((tmp_path / "results.json").read_text())
    assert found["generative"]["a"]["passes"]["2"] == pytest.approx(
        {"value": 1.0, "low": 0.025, "high": 1.0}
    )
    assert found["comparison"]["win_rate"]["low"] is None
    lines = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [line["model"] for line in lines] == ["a", "a", "b", "b"]
    assert lines[1]["parts"] == {"x": None, "y": 0.0}
    assert lines[1]["notes"] == {"x": "took over 1 s"}
    page = (tmp_path / "report.html").read_text()
    assert "&lt;b&gt;2" in page
    assert "<b>2" not in page
    assert "<script src" not in page


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompts": None, "reward": ()}, "there is nothing to evaluate on"),
        ({"reward": ()}, "nothing judges the completions"),
        ({"prompts": None, "text": ("t",)}, "reward has no completions to judge"),
        ({"judge": "runs/r"}, "reward and judge both"),
        ({"k": (1, 3)}, "k=3 needs k samples of each prompt and sampling.n=2"),
        ({"against": "a"}, "is the model itself"),
        ({"task_paths": ("d",)}, "task_paths has no tasks"),
        ({"context": 8, "stride": 8}, "stride=8 must be below context=8"),
        ({"confidence": 1.0}, "between 0 and 1"),
        ({"limit": 0}, "limit=0 must be 1 or more"),
    ],
)
def test_what_makes_no_sense_is_refused(changes: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {
        "model": "a",
        "prompts": "p.jsonl",
        "reward": ("math",),
        "sampling": SampleSettings(n=2, temperature=1.0),
        **changes,
    }
    with pytest.raises(ConfigError, match=message):
        EvaluateConfig(**given)


def test_completions_that_leave_no_room_for_prompts_are_refused() -> None:
    subject: Any = SimpleNamespace(name="a", max_positions=256)
    config = dataclasses.replace(CONFIG, sampling=SampleSettings(n=2, max_tokens=255))
    with pytest.raises(ConfigError, match=r"max_tokens=255 leaves no room .* 256 positions of a"):
        read_prompts(subject, config)
