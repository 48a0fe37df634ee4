"""What one process saw: when each request was answered, how long it took, what failed."""

import time
from collections import Counter
from dataclasses import dataclass, field

__all__ = ["Counts", "Window"]


@dataclass(slots=True)
class Window:
    """When to send and what to count, by `time.monotonic()`, which processes share."""

    start: float
    """What is answered before is not counted."""
    end: float
    """Nothing is sent after; what is answered after is not counted."""


@dataclass(slots=True)
class Counts:
    """Requests answered inside the window."""

    window: Window
    latencies: list[float] = field(default_factory=list)
    """Seconds from sending to the last byte of the answer, of those that succeeded."""
    errors: Counter[str] = field(default_factory=Counter)
    """By reason."""
    examples: dict[str, str] = field(default_factory=dict)
    """The first message of each reason."""

    def succeeded(self, sent: float) -> float:
        """A request sent at `sent` has its answer; returns the time."""
        now = time.monotonic()
        if self.window.start <= now <= self.window.end:
            self.latencies.append(now - sent)
        return now

    def failed(self, reason: str, message: str = "") -> None:
        """A request has none, or an error for one."""
        now = time.monotonic()
        if self.window.start <= now <= self.window.end or reason == "timeout":
            self.errors[reason] += 1
            self.examples.setdefault(reason, message)
