"""Where the time of a run went: every second of a process in exactly one category.

The ledger is one clock with one category running at a time, so that the categories sum to the
wall time by construction. `goodput.jsonl` holds increments, one line a flush:

    {"attempt": 1, "step": 20, "time": 1763683200.0, "seconds": {"step": 3.9, "evaluate": 0.2}}

and each attempt (each process that worked in the run directory) opens with the step it started
from. What an earlier attempt computed beyond that step was computed again: `summarise` counts that
time as lost.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from fornax.train.jsonl import JsonLines, read_json_lines

__all__ = ["CATEGORIES", "Category", "Goodput", "Ledger", "summarise"]

Category = Literal[
    "initialise", "compile", "wait_for_data", "step", "checkpoint", "restore", "evaluate", "lost"
]
CATEGORIES: tuple[Category, ...] = get_args(Category)
"""`checkpoint` is the time training stood still for one; `lost` is only ever found afterwards."""

_REDONE = ("wait_for_data", "step", "checkpoint", "evaluate")


class Ledger:
    """A clock that is always in one category."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """Start the clock, in `initialise`."""
        self._clock = clock
        self._since = clock()
        self._category: Category = "initialise"
        self._totals: dict[Category, float] = dict.fromkeys(CATEGORIES, 0.0)
        self._written = dict(self._totals)
        self._file: JsonLines | None = None
        self._attempt = 0

    def enter(self, category: Category) -> None:
        """From now on time belongs to `category`."""
        now = self._clock()
        self._totals[self._category] += now - self._since
        self._since, self._category = now, category

    @contextmanager
    def phase(self, category: Category) -> Iterator[None]:
        """Within the block time belongs to `category`, and after it to what ran before."""
        before = self._category
        self.enter(category)
        try:
            yield
        finally:
            self.enter(before)

    def totals(self) -> dict[Category, float]:
        """Seconds a category so far; they sum to the age of the ledger."""
        self.enter(self._category)
        return dict(self._totals)

    def open(self, path: Path, start_step: int) -> None:
        """Write from now on to `path`, as a new attempt that starts after `start_step`."""
        earlier = [r["attempt"] for r in read_json_lines(path)]
        self._attempt = max(earlier, default=0) + 1
        self._file = JsonLines(path)
        self._file.write(
            {"attempt": self._attempt, "start_step": start_step, "time": round(time.time(), 3)}
        )

    def flush(self, step: int) -> None:
        """Write what was added since the last flush; `step` is the last step it contains."""
        if self._file is None:
            return
        totals = self.totals()
        added = {c: totals[c] - self._written[c] for c in CATEGORIES}
        self._written = totals
        seconds = {c: round(s, 6) for c, s in added.items() if s > 0}
        self._file.write(
            {
                "attempt": self._attempt,
                "step": step,
                "time": round(time.time(), 3),
                "seconds": seconds,
            }
        )

    def close(self, step: int) -> None:
        """Write the rest and close the file."""
        self.flush(step)
        if self._file is not None:
            self._file.close()
            self._file = None


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """The summary of a `goodput.jsonl`."""

    seconds: dict[Category, float]
    """Seconds a category over all attempts; they sum to `wall_seconds`."""
    wall_seconds: float
    """Time processes spent on this run, all attempts together."""
    attempts: int
    """How many processes worked on this run, one after the other."""

    @property
    def goodput(self) -> float:
        """The share of the wall time that went into steps that were kept."""
        return self.seconds["step"] / self.wall_seconds if self.wall_seconds else 0.0


def summarise(path: Path) -> Goodput:
    """Read a ledger; time on steps that a later attempt computed again becomes `lost`."""
    records = read_json_lines(path)
    starts = {r["attempt"]: r["start_step"] for r in records if "start_step" in r}
    seconds: dict[Category, float] = dict.fromkeys(CATEGORIES, 0.0)
    for record in records:
        for category, spent in record.get("seconds", {}).items():
            seconds["lost" if _was_lost(record, category, starts) else category] += spent
    return Goodput(seconds=seconds, wall_seconds=sum(seconds.values()), attempts=len(starts))


def _was_lost(record: dict[str, Any], category: str, starts: dict[int, int]) -> bool:
    kept = min((s for a, s in starts.items() if a > record["attempt"]), default=record["step"])
    return category in _REDONE and record["step"] > kept
