"""What an evaluation found: as JSON, as rows of a table, and as the files that it leaves."""

import dataclasses
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from markupsafe import Markup

from fornax.evaluate.comparison import Comparison
from fornax.evaluate.config import EvaluateConfig
from fornax.evaluate.generative import Answered, Generative
from fornax.evaluate.harness import TaskResults, metrics
from fornax.evaluate.perplexity import Perplexity
from fornax.evaluate.statistics import Estimate
from fornax.pages import Section, render, table
from fornax.tune.data.records import JsonObject

__all__ = ["Results", "rows", "to_json_text", "write_files"]


@dataclass(frozen=True, kw_only=True)
class Results:
    """What an evaluation found; what was not asked for is empty."""

    config: EvaluateConfig
    perplexity: dict[str, Perplexity] = field(default_factory=dict)
    """By model."""
    generative: dict[str, Generative] = field(default_factory=dict)
    """By model."""
    comparison: Comparison | None = None
    tasks: dict[str, TaskResults] = field(default_factory=dict)
    """Results of lm-eval-harness, by model."""
    answers: dict[str, list[Answered]] = field(default_factory=dict, repr=False)
    """Completions with their scores, by model."""

    def to_json(self) -> JsonObject:
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


def to_json_text(results: Results) -> str:
    """`Results.to_json` as text."""
    return json.dumps(results.to_json(), indent=2, ensure_ascii=False)


def _plain(value: object) -> Any:
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


HEAD = ("model", "measure", "value", "note")

Row = tuple[str, str, str, str]


def rows(results: Results) -> Iterator[Row]:
    """Every figure of the results."""
    for model in (results.config.model, results.config.against):
        if model is not None:
            yield from _of_model(results, model)
    yield from _of_comparison(results)


def _of_model(results: Results, model: str) -> Iterator[Row]:
    text = results.perplexity.get(model)
    if text is not None:
        size = f"{text.documents} documents, {text.tokens:,} tokens, {text.bytes:,} bytes"
        yield model, "bits per byte", str(text.bits_per_byte), size
        yield model, "perplexity", str(text.perplexity), "per token"
        yield model, "loss", str(text.loss), "nats per token"
    found = results.generative.get(model)
    if found is not None:
        size = f"{found.prompts} prompts, {found.samples} completions"
        yield model, "reward", str(found.reward), size
        for name, part in found.parts.items():
            failed = found.failures[name]
            if len(found.parts) > 1 or failed:
                note = f"failed on {failed} completions" if failed else ""
                yield model, f"reward/{name}", str(part), note
        for k, passed in found.passes.items():
            yield (
                model,
                f"pass@{k}",
                str(passed),
                f"total reward {results.config.threshold:g} or more",
            )
        yield model, "completion tokens", str(found.tokens), ""
        yield model, "truncated", str(found.truncated), "share that ran out of tokens"
    for task, metric, value, error in metrics(results.tasks.get(model, {})):
        spread = "" if error is None else f" ± {error:.4g}"
        yield model, f"{task} {metric}", f"{value:.4g}{spread}", "lm-eval-harness; standard error"


def _of_comparison(results: Results) -> Iterator[Row]:
    found = results.comparison
    if found is None:
        return
    model = f"{results.config.model} against {results.config.against}"
    counts = f"{found.wins} won, {found.ties} tied, {found.losses} lost of {found.prompts} prompts"
    yield model, "win rate", str(found.win_rate), f"{counts}; p = {found.p_value:.2g}"
    yield model, "difference of scores", str(found.difference), ""
    lengths = f"{found.tokens[0]:.1f} and {found.tokens[1]:.1f} tokens"
    yield model, "longer one wins", f"{found.longer_wins:.3g}", f"mean lengths {lengths}"


_SHOWN = 50


def write_files(results: Results, folder: Path) -> None:
    """Write what was found into a folder that exists.

    Raises:
      ConfigError: the report cannot be written.
    """
    (folder / "results.json").write_text(to_json_text(results) + "\n", encoding="utf-8")
    samples = list(_samples(results))
    if samples:
        with (folder / "samples.jsonl").open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(one, ensure_ascii=False) + "\n" for one in samples)
    measured = list(rows(results))
    sections = [
        Section(
            title="Results",
            lead=f"Intervals hold {results.config.confidence:.0%}, by resampling of documents or "
            "prompts; where nothing or everything passes, one end is Clopper and Pearson's.",
            body=table(HEAD, measured),
        )
    ]
    if samples:
        lead = f"All {len(samples)} are in samples.jsonl." if len(samples) > _SHOWN else ""
        cards = Markup("").join(_card(one) for one in samples[:_SHOWN])
        sections.append(Section(title="Completions", lead=lead, body=cards))
    render(
        folder / "report.html",
        title="Evaluation",
        subtitle=results.config.model,
        figures=[(measure, value) for _, measure, value, _ in measured[:4]],
        sections=sections,
    )


def _samples(results: Results) -> list[JsonObject]:
    return [
        {
            "model": model,
            "prompt": each.prompt.prompt,
            "where": each.prompt.where,
            "completion": completion.text,
            "tokens": len(completion),
            "finish_reason": completion.finish_reason,
            "reward": score.total,
            "parts": {name: None if part != part else part for name, part in score.parts.items()},
            "notes": dict(score.notes),
        }
        for model, answered in results.answers.items()
        for each in answered
        for completion, score in zip(each.completions, each.scores, strict=True)
    ]


def _card(sample: JsonObject) -> Markup:
    parts = ", ".join(f"{name} {part}" for name, part in sample["parts"].items())
    head = f"{sample['model']} · {sample['where']} · reward {sample['reward']:.4g} ({parts})"
    prompt = sample["prompt"]
    if not isinstance(prompt, str):
        prompt = "\n".join(f"{message['role']}: {message.get('content')}" for message in prompt)
    return Markup(
        "<details><summary>{}</summary><p>prompt</p><pre>{}</pre><p>completion</p><pre>{}</pre>"
        "</details>"
    ).format(head, prompt, sample["completion"])
