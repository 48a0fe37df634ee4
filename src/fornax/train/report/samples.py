"""The samples of a run, to be looked through: chosen by step, in order of reward."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fornax.config.jsonl import read_json_lines
from fornax.pages import Section, fill

__all__ = ["samples_section"]

_MOST = 400
_ROUNDS = 24
_LONGEST = 4000

_ORDERS = (
    ("place:1", "as they were drawn"),
    ("reward:-1", "highest reward first"),
    ("reward:1", "lowest reward first"),
    ("advantage:-1", "highest advantage first"),
    ("tokens:-1", "longest first"),
)


def samples_section(file: Path) -> Section | None:
    """The samples in `samples.jsonl`, or None where there are none.

    Of a long run the rounds shown are spread evenly, with its first and its last.
    """
    records = read_json_lines(file) if file.is_file() else []
    if not records:
        return None
    chosen, steps = _chosen(records)
    every = "" if len(chosen) == len(records) else f", of {len(records):,} in {file.name}"
    return Section(
        title="Samples",
        lead=f"{len(chosen):,} completions from {len(steps)} steps{every}. The prompt is grey, "
        "what the model wrote is coloured; beside the reward stand its parts, before their "
        "weights.",
        body=fill(
            "samples.html.j2",
            package="fornax.train.report",
            steps=steps,
            orders=_ORDERS,
            cards=[_card(each) for each in chosen],
        ),
    )


def _chosen(records: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, object]], list[int]]:
    steps = sorted({record["step"] for record in records})
    size = max(1, len(records) // len(steps))
    rounds = max(2, min(_ROUNDS, _MOST // size))
    if len(steps) > rounds:
        last = len(steps) - 1
        steps = sorted({steps[round(i * last / (rounds - 1))] for i in range(rounds)})
    kept: dict[int, list[Mapping[str, Any]]] = {step: [] for step in steps}
    for record in records:
        of_step = kept.get(record["step"])
        if of_step is not None and len(of_step) < _MOST // len(steps):
            of_step.append(record)
    return [record for step in steps for record in kept[step]], steps


def _card(record: Mapping[str, Any]) -> dict[str, object]:
    reward, advantage = record.get("reward") or 0.0, record.get("advantage") or 0.0
    tokens, ended = record.get("tokens", 0), record.get("finish_reason", "")
    parts = record.get("rewards") or {}
    tags = [
        ("reward", f"{reward:.3g}"),
        *((name, "none" if x is None else f"{x:.3g}") for name, x in parts.items()),
        ("advantage", f"{advantage:+.3g}"),
        ("tokens", f"{tokens}, {_ENDS.get(ended, ended)}"),
        ("prompt", Path(record.get("where", "")).name),
    ]
    return {
        "step": record["step"],
        "reward": reward,
        "advantage": advantage,
        "tokens": tokens,
        "tags": tags,
        "prompt": _cut(record.get("prompt", "")),
        "completion": _cut(record.get("completion", "")),
    }


_ENDS = {"stop": "ended by itself", "length": "truncated"}


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} … ({len(text):,} characters)"
