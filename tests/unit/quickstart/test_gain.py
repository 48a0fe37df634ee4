"""Repeated evaluations: each is one draw of every prompt, and a gain must clear them all."""

import numpy as np
import pytest

from fornax.evaluate.generative import Answered
from fornax.quickstart.gain import beyond_spread, describe
from fornax.quickstart.report_tuning import tuning_sections
from fornax.rewards import Score
from fornax.train import RunDirectory
from fornax.tune.data import PromptTokens
from fornax.tune.rollout import Completion


def _completion(text: str, tokens: int, reason: str = "stop") -> Completion:
    return Completion(
        tokens=np.zeros(tokens, np.int32),
        logprobs=np.zeros(tokens, np.float32),
        versions=np.zeros(tokens, np.int32),
        mask=np.ones(tokens, np.int8),
        finish_reason=reason,
        text=text,
        seed=0,
    )


def _answered(rewards: list[float], texts: list[str]) -> Answered:
    return Answered(
        prompt=PromptTokens(tokens=np.zeros(1, np.int32), prompt="p", tools=None),
        completions=[
            _completion(text, 2 + number, "length" if number else "stop")
            for number, text in enumerate(texts)
        ],
        scores=[
            Score(total=r, parts={"reward": r, "answers": float(r == 1), "parses": 1.0})
            for r in rewards
        ],
    )


def test_an_evaluation_is_one_draw_of_every_prompt() -> None:
    found = describe([_answered([1.0, 0.0], ["a", "b"]), _answered([0.5, 0.5], ["a", "c"])])
    assert found["reward"]["repeats"] == [0.75, 0.25]
    assert found["reward"]["mean"] == 0.5
    assert found["reward"]["deviation"] == pytest.approx(0.35355, abs=1e-5)
    assert found["answers"]["repeats"] == [0.5, 0.0]
    assert (found["distinct"], found["tokens"], found["unended"]) == (0.75, 2.5, 0.5)


def _figures(repeats: list[float]) -> dict:
    of = {"mean": float(np.mean(repeats)), "deviation": 0.01, "repeats": repeats}
    shape = {"distinct": 0.9, "tokens": 7.0, "unended": 0.0}
    return {"reward": of, "answers": of, "parses": of, **shape}


def _gain(before: list[float], after: list[float]) -> dict:
    drawn = {"text": "    return <x>\n", "reward": 0.5}
    return {
        "prompts": 1,
        "repeats": 2,
        "temperature": 0.7,
        "models": {
            "base": _figures([0.0, 0.0]),
            "sft": _figures(before),
            "grpo": _figures(after),
        },
        "people": {
            "reward": 1.0,
            "answers": 1.0,
            "parses": 1.0,
            "distinct": 1.0,
            "tokens": 9.0,
            "unended": 0.0,
        },
        "samples": [
            {"prompt": "def f(x):\n", "people": "    return x\n"}
            | dict.fromkeys(("base", "sft", "grpo"), drawn)
        ],
    }


def test_a_gain_clears_every_repeat() -> None:
    assert beyond_spread(_gain([0.1, 0.2], [0.3, 0.21]), "sft", "grpo")
    assert not beyond_spread(_gain([0.1, 0.2], [0.9, 0.19]), "sft", "grpo")


def test_the_page_says_whether_anything_was_gained(tmp_path) -> None:
    runs = []
    for name in ("sft", "grpo"):
        run = RunDirectory(tmp_path / name)
        run.path.mkdir()
        run.metrics.write_text('{"step": 1, "loss": 1.0, "reward": 0.5, "entropy": 1.0}\n')
        runs.append(run)
    results = {
        "gain": _gain([0.1, 0.2], [0.3, 0.4]),
        "functions": {"train": 7, "eval": 1},
        "sft": {"steps": 1},
        "grpo": {"steps": 1, "completions": 8, "group_size": 4},
        "tuned": {"directory": "hf-tuned", "adapter": "adapter", "adapter_bytes": 10},
    }
    gained, samples, _ = tuning_sections(results, *runs)
    assert "The worst of 2 evaluations after GRPO is above" in gained.lead
    assert "0.350 ± 0.010" in gained.body
    assert "return &lt;x&gt;" in samples.body
    lost = tuning_sections({**results, "gain": _gain([0.1, 0.2], [0.1, 0.4])}, *runs)[0]
    assert "no gain is shown" in lost.lead
