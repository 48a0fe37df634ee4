"""Numbers of a run by step, as curves take them."""

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["series", "thin"]

_BUCKETS = 400


def series(records: Sequence[Mapping[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """(steps, values) of a metric, where it was recorded."""
    points = [(r["step"], r[name]) for r in records if r.get(name) is not None]
    return [step for step, _ in points], [value for _, value in points]


def thin(steps: list[int], values: list[float]) -> tuple[list[float], list[float]]:
    """Means over equal runs of points, so that a million steps draw as a few hundred points."""
    width = max(1, len(steps) // _BUCKETS)
    groups = [slice(i, i + width) for i in range(0, len(steps), width)]
    return (
        [sum(steps[g]) / len(steps[g]) for g in groups],
        [sum(values[g]) / len(values[g]) for g in groups],
    )
