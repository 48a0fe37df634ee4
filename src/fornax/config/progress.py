"""What a run shows while it works: a bar on a terminal, one line an interval elsewhere."""

import sys
import time
from collections.abc import Mapping
from typing import Any, Literal, Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from fornax.config.files import is_full

__all__ = ["Bar", "Lines", "Progression", "Quiet", "choose"]

ProgressName = Literal["auto", "bar", "lines", "none"]

_BESIDE_LOSS = ("reward", "reward_margin")
"""What says more than the loss, where a task has it."""


class Progression(Protocol):
    """Shows how far a run is."""

    def start(self, step: int, total: int, unit: str) -> None:
        """The run resumes from `step` to `total`; throughput is in `unit` a second."""
        ...

    def update(self, record: Mapping[str, object], seconds_left: float | None) -> None:
        """A step is done; `record` is its metrics. None: the rate is not known yet."""
        ...

    def log(self, text: str) -> None:
        """Show a line of text."""
        ...

    def close(self) -> None:
        """Leave the terminal as it was."""
        ...


class Quiet:
    """Shows nothing."""

    def start(self, step: int, total: int, unit: str) -> None:
        """Show nothing."""

    def update(self, record: Mapping[str, object], seconds_left: float | None) -> None:
        """Show nothing."""

    def log(self, text: str) -> None:
        """Show nothing."""

    def close(self) -> None:
        """Show nothing."""


class Lines:
    """One line every `interval` seconds, and one at the end, for logs."""

    def __init__(self, stream: TextIO | None = None, interval: float = 10.0) -> None:
        """Write to `stream` (standard error)."""
        self._stream = stream or sys.stderr
        self._interval = interval
        self._last_time = -float("inf")
        self._last: str | None = None
        self._total, self._unit = 0, "tokens"

    def start(self, step: int, total: int, unit: str) -> None:
        """Remember where the run ends."""
        self._total, self._unit = total, unit

    def update(self, record: Mapping[str, object], seconds_left: float | None) -> None:
        """Write a line when the interval has passed."""
        self._last = f"step {record['step']}/{self._total}  " + _figures(
            record, self._unit, seconds_left
        )
        if time.monotonic() - self._last_time >= self._interval:
            self._flush()

    def log(self, text: str) -> None:
        """Write the line; where the log is on a disk that is full, it is lost or comes later."""
        try:
            print(text, file=self._stream, flush=True)
        except OSError as error:
            if not is_full(error):
                raise

    def close(self) -> None:
        """Write the last step's line, if it was not written."""
        self._flush()

    def _flush(self) -> None:
        if self._last is not None:
            self.log(self._last)
            self._last, self._last_time = None, time.monotonic()


class Bar:
    """A bar that redraws itself, with loss, throughput and time left."""

    def __init__(self, console: Console | None = None) -> None:
        """Draw on `console` (standard error)."""
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("{task.completed}/{task.total}"),
            TextColumn("{task.fields[figures]}"),
            console=console or Console(stderr=True),
            refresh_per_second=4,
        )
        self._task = self._progress.add_task("train", total=None, figures="starting")
        self._unit = "tokens"

    def start(self, step: int, total: int, unit: str) -> None:
        """Show the bar."""
        self._unit = unit
        self._progress.update(self._task, completed=step, total=total, figures="compiling")
        self._progress.start()

    def update(self, record: Mapping[str, Any], seconds_left: float | None) -> None:
        """Move the bar."""
        self._progress.update(
            self._task,
            completed=record["step"],
            figures=_figures(record, self._unit, seconds_left),
        )

    def log(self, text: str) -> None:
        """Print above the bar."""
        self._progress.console.print(text, highlight=False, markup=False)

    def close(self) -> None:
        """Leave the finished bar on the screen."""
        self._progress.stop()


def choose(name: ProgressName = "auto") -> Progression:
    """The display called `name`; `auto` is a bar on a terminal and lines elsewhere."""
    if name == "none":
        return Quiet()
    if name == "bar" or (name == "auto" and sys.stderr.isatty()):
        return Bar()
    return Lines()


def _figures(record: Mapping[str, Any], unit: str, seconds_left: float | None) -> str:
    parts = [f"loss {record['loss']:.4f}"]
    parts += [f"{name} {record[name]:.4f}" for name in _BESIDE_LOSS if name in record]
    rate = record.get(f"{unit}_per_second")
    if rate:
        parts.append(f"{_short(rate)} {unit}/s")
    if record.get("mfu"):
        parts.append(f"mfu {record['mfu']:.1%}")
    if seconds_left is not None:
        parts.append(f"{_clock(seconds_left)} left")
    return "  ".join(parts)


def _short(value: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.1f}{letter}"
    return f"{value:.0f}"


def _clock(seconds: float) -> str:
    whole = max(0, round(seconds))
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
