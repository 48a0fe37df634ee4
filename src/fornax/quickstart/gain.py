"""Reward of completions of held-out functions, before and after tuning, repeated for its spread."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fornax.evaluate import EvaluateConfig
from fornax.evaluate.generative import (
    Answered,
    Answerer,
    judge_by_rewards,
    open_pool,
    read_prompts,
)
from fornax.evaluate.model import open_model
from fornax.quickstart.tuning import REWARD
from fornax.rewards import RewardSpec, Sample
from fornax.tune.rollout import SampleSettings

__all__ = ["AFTER", "BEFORE", "JUDGES", "beyond_spread", "describe", "measure"]

BEFORE, AFTER = "sft", "grpo"
"""What reinforcement learning began at and what it made."""

JUDGES = (
    RewardSpec(function=REWARD.function, options=dict(REWARD.options), name="reward"),
    RewardSpec(function=REWARD.function, options={"docstring": "true"}, name="answers"),
    RewardSpec(function="python_parses", name="parses"),
)
"""The reward that was trained on; whether every condition is met; whether it is Python at all."""

_SHOWN = 6


def measure(
    models: Mapping[str, Path],
    prompts: Path,
    *,
    repeats: int,
    temperature: float,
    max_tokens: int,
    seed: int,
    log: Path,
) -> dict[str, Any]:
    """Draw and judge completions of every prompt, `repeats` times from each model.

    The bodies that people wrote are judged too: what the rewards say of right answers.

    Args:
      models: name to model, a Hugging Face directory or a run.
      prompts: JSON lines with `prompt` and `completion`.
      repeats: evaluations, each with draws of its own; 2 or more for a spread.
      temperature: of the draws.
      max_tokens: of a completion.
      seed: of the draws.
      log: file for failures of the rewards.
    """
    config = EvaluateConfig(
        model=str(next(iter(models.values()))),
        prompts=str(prompts),
        reward=JUDGES,
        sampling=SampleSettings(n=repeats, temperature=temperature, max_tokens=max_tokens),
        max_num_seqs=64,
        reward_workers=2,
        seed=seed,
    )
    found: dict[str, Any] = {}
    subjects = {name: open_model(str(path)) for name, path in models.items()}
    asked = read_prompts(next(iter(subjects.values())), config)
    with open_pool(config, asked, log) as pool, Answerer(config) as answer:
        answers = {
            name: judge_by_rewards(asked, answer(subject, asked), pool)
            for name, subject in subjects.items()
        }
        written = [str(each.record["completion"]) for each in asked]
        right = pool.score(
            [Sample(p.prompt, w, p.record) for p, w in zip(asked, written, strict=True)]
        )
    found["models"] = {name: describe(answered) for name, answered in answers.items()}
    encoded = next(iter(subjects.values())).origin.tokenizer.encode_batch(written)
    found["people"] = {
        **{j.name: statistics.fmean(score.parts[j.name] for score in right) for j in JUDGES},
        "distinct": len(set(written)) / len(written),
        "tokens": statistics.fmean(len(tokens) + 1 for tokens in encoded),
        "unended": 0.0,
    }
    found["samples"] = [
        {
            "prompt": str(prompt.prompt),
            "people": written[number],
            **{name: _shown(answered[number]) for name, answered in answers.items()},
        }
        for number, prompt in enumerate(asked[:_SHOWN])
    ]
    return {"prompts": len(asked), "repeats": repeats, "temperature": temperature, **found}


def describe(answered: Sequence[Answered]) -> dict[str, Any]:
    """A model's figures: evaluation i is completion i of every prompt."""
    repeats = len(answered[0].completions)
    texts = [each.text for one in answered for each in one.completions]
    figures: dict[str, Any] = {
        judge.name: _spread(
            [
                statistics.fmean(one.scores[i].parts[judge.name] for one in answered)
                for i in range(repeats)
            ]
        )
        for judge in JUDGES
    }
    lengths = [len(each) for one in answered for each in one.completions]
    return {
        **figures,
        "distinct": len(set(texts)) / len(texts),
        "tokens": statistics.fmean(lengths),
        "unended": statistics.fmean(
            float(each.truncated) for one in answered for each in one.completions
        ),
    }


def beyond_spread(result: Mapping[str, Any], before: str, after: str) -> bool:
    """Whether every repeat of one model has more reward than all of another's."""
    models = result["models"]
    return min(models[after]["reward"]["repeats"]) > max(models[before]["reward"]["repeats"])


def _spread(repeats: list[float]) -> dict[str, object]:
    deviation = statistics.stdev(repeats) if len(repeats) > 1 else 0.0
    return {"mean": statistics.fmean(repeats), "deviation": deviation, "repeats": repeats}


def _shown(answered: Answered) -> dict[str, object]:
    return {
        "text": answered.completions[0].text,
        "reward": answered.scores[0].parts["reward"],
    }
