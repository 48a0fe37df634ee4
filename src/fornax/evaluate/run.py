"""One evaluation from its config to its results and files."""

import dataclasses
import tempfile
from pathlib import Path

from fornax.evaluate.comparison import compare
from fornax.evaluate.config import EvaluateConfig
from fornax.evaluate.generative import (
    JUDGE,
    Answered,
    Answerer,
    judge_by_model,
    judge_by_rewards,
    load_judge,
    open_pool,
    read_prompts,
    summarise,
)
from fornax.evaluate.harness import check_harness, run_tasks
from fornax.evaluate.model import EvaluatedModel, open_model
from fornax.evaluate.perplexity import measure_perplexity
from fornax.evaluate.results import Results, write_files

__all__ = ["evaluate"]


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
    subjects = [open_model(config.model, config.template)]
    if config.against is not None:
        subjects.append(open_model(config.against, config.template))
    results = Results(config=config)
    if config.prompts:
        results = _generative(results, subjects, folder)
    for subject in subjects:
        if config.text:
            results.perplexity[subject.name] = measure_perplexity(subject, config)
        if config.tasks:
            results.tasks[subject.name] = run_tasks(subject, config)
    if folder is not None:
        write_files(results, folder)
    return results


def _generative(results: Results, subjects: list[EvaluatedModel], folder: Path | None) -> Results:
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
    subjects: list[EvaluatedModel], config: EvaluateConfig, log: Path
) -> tuple[list[str], list[list[Answered]]]:
    prompts = [read_prompts(subject, config) for subject in subjects]
    with open_pool(config, prompts[0], log) as pool, Answerer(config) as answer:
        answers = [
            judge_by_rewards(own, answer(subject, own), pool)
            for subject, own in zip(subjects, prompts, strict=True)
        ]
    return list(pool.names), answers


def _judged_by_model(
    subjects: list[EvaluatedModel], config: EvaluateConfig, log: Path
) -> tuple[list[str], list[list[Answered]]]:
    del log
    judge = load_judge(str(config.judge))
    answers = []
    with Answerer(config) as answer:
        for subject in subjects:
            prompts = read_prompts(subject, config)
            answers.append(judge_by_model(prompts, answer(subject, prompts), judge))
    return [JUDGE], answers
