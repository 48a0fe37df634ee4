"""Progress of work in stages: a bar with rate and time left on a terminal, lines elsewhere."""

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)


class Stages:
    """Call it with a stage, what is done and what is to do; within the block it shows them."""

    def __init__(self, unit: str, interval: float = 10.0) -> None:
        """Count in `unit`; off a terminal, show a line every `interval` seconds."""
        self._unit = unit
        self._interval = interval
        self._started: dict[str, float] = {}
        self._latest = time.monotonic()
        self._shown = self._latest
        self._bar = _bar() if sys.stderr.isatty() else None
        self._tasks = {}

    def __enter__(self) -> "Stages":
        """Draw the bar."""
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave the terminal as it was."""
        if self._bar:
            self._bar.stop()

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Show how far a stage is."""
        # A stage begins where the one before it ended: its first call comes after some work.
        started = self._started.setdefault(stage, self._latest)
        self._latest = time.monotonic()
        rate = done / max(self._latest - started, 1e-9)
        rate_text = f"{rate:,.0f} {self._unit}/s"
        if self._bar:
            if stage not in self._tasks:
                self._tasks[stage] = self._bar.add_task(stage, total=total, rate="")
            self._bar.update(self._tasks[stage], completed=done, total=total, rate=rate_text)
        elif done >= total or self._latest - self._shown >= self._interval:
            self._shown = self._latest
            left = (total - done) / rate if rate else 0.0
            line = f"{stage}: {done:,} of {total:,} {self._unit}, {rate_text}, {left:.0f} s left"
            print(line, file=sys.stderr, flush=True)  # noqa: T201


def _bar() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )
