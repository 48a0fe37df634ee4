"""The files an evaluation leaves: results.json, samples.jsonl, report.html."""

import json
from pathlib import Path
from typing import Any

from markupsafe import Markup

from fornax.evaluate.run import Results, to_json_text
from fornax.evaluate.tables import HEAD, rows
from fornax.train.report import Section, render, table

__all__ = ["write_files"]

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


def _samples(results: Results) -> list[dict[str, Any]]:
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


def _card(sample: dict[str, Any]) -> Markup:
    parts = ", ".join(f"{name} {part}" for name, part in sample["parts"].items())
    head = f"{sample['model']} · {sample['where']} · reward {sample['reward']:.4g} ({parts})"
    prompt = sample["prompt"]
    if not isinstance(prompt, str):
        prompt = "\n".join(f"{message['role']}: {message.get('content')}" for message in prompt)
    return Markup(
        "<details><summary>{}</summary><p>prompt</p><pre>{}</pre><p>completion</p><pre>{}</pre>"
        "</details>"
    ).format(head, prompt, sample["completion"])
