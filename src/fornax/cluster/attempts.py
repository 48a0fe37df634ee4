"""Whether a run that fails again and again gets anywhere, and how often it fails."""

import time

from fornax.cluster.verdict import Verdict

__all__ = ["Attempts"]

_FRUITLESS_FAULTS = 3


class Attempts:
    """The steps that groups began with and reached, and the faults between them."""

    def __init__(self) -> None:
        """Nothing was tried yet."""
        self.best = -1
        """The newest step that all ranks have entered."""
        self._best_at_fault = self._began = self._began_at_fault = -1
        self._fruitless = self._failures = 0
        self._since = time.monotonic()

    def begin(self, step: int) -> None:
        """A group has entered its first step.

        One that begins earlier than the group before lost what that had; its progress counts from
        there.
        """
        if step < self._began:
            self.best = self._best_at_fault = self._began_at_fault = step
        self._began = step
        self.reach(step)

    def reach(self, step: int) -> None:
        """All ranks have entered a step."""
        self.best = max(self.best, step)

    def mtbf(self, expected: float) -> float:
        """Mean seconds between failures of the run: as expected, or less where there were more.

        It is the mean of a rate of which one failure in the expected time was known beforehand.
        """
        seen = (expected + time.monotonic() - self._since) / (1 + self._failures)
        return min(expected, seen)

    def fail(self, verdict: Verdict) -> str | None:
        """Count a fault; in words, why there is no use in going on, where there is none."""
        if verdict.kind not in ("preempted", "slow"):  # nothing is lost then
            self._failures += 1
        forward = self.best > self._best_at_fault or self._began > self._began_at_fault
        self._fruitless = 1 if forward else self._fruitless + 1
        self._best_at_fault = max(self.best, self._best_at_fault)
        self._began_at_fault = max(self._began, self._began_at_fault)
        if self._fruitless < _FRUITLESS_FAULTS:
            return None
        where = f"step {self.best}" if self.best >= 0 else "the first step"
        return (
            f"the run failed {self._fruitless} times without getting beyond {where}; the last "
            f"time {verdict.text}"
        )
