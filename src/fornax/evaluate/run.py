"""One evaluation from its config to its results and files."""

import dataclasses
import json
import math
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fornax.evaluate.comparison import Comparison, compare
from fornax.evaluate.config import EvaluateConfig
from fornax.evaluate.generative import (
    Answered,
    Answerer,
    Generative,
    judge_by_rewards,
    open_pool,
    read_prompts,
    summarise,
)
from fornax.evaluate.harness import check_harness, run_tasks
from fornax.evaluate.judge import JUDGE, judge_by_model, load_judge
from fornax.evaluate.perplexity import Perplexity, measure_perplexity
from fornax.evaluate.statistics import Estimate
from fornax.evaluate.subject import Subject, open_subject

__all__ = ["Results", "evaluate"]


@dataclass(frozen=True, kw_only=True)
class Results:
    """What an evaluation found; what was not asked for is empty."""

    config: EvaluateConfig
    perplexity: dict[str, Perplexity] = field(default_factory=dict)
    """By model."""
    generative: dict[str, Generative] = field(default_factory=dict)
    """By model."""
    comparison: Comparison | None = None
    tasks: dict[str, Any] = field(default_factory=dict)
    """Results of lm-eval-harness, by model."""
    answers: dict[str, list[Answered]] = field(default_factory=dict, repr=False)
    """Completions with their scores, by model."""

    def to_json(self) -> dict[str, Any]:
        """Everything but the completions, for a JSON file; NaN is null."""
        found = {
            "model": self.config.model,
            "against": self.config.against,
            "perplexity": self.perplexity,
            "generative": self.generative,
            "comparison": self.comparison,
            "tasks": self.tasks,
        }
        return {name: _plain(value) for name, value in found.items() if value}


def evaluate(config: EvaluateConfig, *, out: str | Path | None = None) -> Results:
    """Measure what `config` asks for.

    Rewards and prompts are checked before any model is loaded whole.

    Args:
      config: what to measure.
      out: folder for results.json, samples.jsonl, rewards.log and report.html; None writes none.

    Raises:
      ConfigError, DataError, CheckpointError: what is wrong with the model, data or rewards.
    """
    if config.tasks:
        check_harness()
    folder = None if out is None else Path(out)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    subjects = [open_subject(config.model, config.template)]
    if config.against is not None:
        subjects.append(open_subject(config.against, config.template))
    results = Results(config=config)
    if config.prompts:
        results = _generative(results, subjects, folder)
    for subject in subjects:
        if config.text:
            results.perplexity[subject.name] = measure_perplexity(subject, config)
        if config.tasks:
            results.tasks[subject.name] = run_tasks(subject, config)
    if folder is not None:
        from fornax.evaluate.files import write_files

        write_files(results, folder)
    return results


def _generative(results: Results, subjects: list[Subject], folder: Path | None) -> Results:
    config = results.config
    judged = _judged_by_model if config.judge else _judged_by_rewards
    with tempfile.TemporaryDirectory() as scratch:
        names, answers = judged(subjects, config, (folder or Path(scratch)) / "rewards.log")
    for subject, answered in zip(subjects, answers, strict=True):
        results.answers[subject.name] = answered
        results.generative[subject.name] = summarise(answered, names, config)
    comparison = compare(answers[0], answers[1], config) if len(answers) == 2 else None
    return dataclasses.replace(results, comparison=comparison)


def _judged_by_rewards(
    subjects: list[Subject], config: EvaluateConfig, log: Path
) -> tuple[list[str], list[list[Answered]]]:
    prompts = [read_prompts(subject, config) for subject in subjects]
    with open_pool(config, prompts[0], log) as pool, Answerer(config) as answer:
        answers = [
            judge_by_rewards(own, answer(subject, own), pool)
            for subject, own in zip(subjects, prompts, strict=True)
        ]
    return list(pool.names), answers


def _judged_by_model(
    subjects: list[Subject], config: EvaluateConfig, log: Path
) -> tuple[list[str], list[list[Answered]]]:
    del log
    judge = load_judge(str(config.judge))
    answers = []
    with Answerer(config) as answer:
        for subject in subjects:
            prompts = read_prompts(subject, config)
            answers.append(judge_by_model(prompts, answer(subject, prompts), judge))
    return [JUDGE], answers


def to_json_text(results: Results) -> str:
    """`Results.to_json` as text."""
    return json.dumps(results.to_json(), indent=2, ensure_ascii=False)


def _plain(value: Any) -> Any:
    if isinstance(value, Estimate):
        numbers = {"value": value.value, "low": value.low, "high": value.high}
        return {name: _plain(number) for name, number in numbers.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, str | int | float | bool | None) else str(value)
