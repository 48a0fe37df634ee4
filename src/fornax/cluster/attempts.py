"""Whether a run that fails again and again gets anywhere, and how often it fails."""

import time

from fornax.cluster.verdict import Verdict

__all__ = ["Attempts"]

_MOST_FAULTS = 3
_ELSEWHERE_FAULTS = 2


class Attempts:
    """The steps that groups began with and reached, and the faults between them."""

    def __init__(self) -> None:
        """Nothing was tried yet."""
        self.best = -1
        """The newest step that all ranks have entered."""
        self._best_at_fault = self._began = self._began_at_fault = -1
        self._fruitless = self._failures = 0
        self._alike: list[Verdict] = []
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

    def needs_another_host(self, verdict: Verdict) -> bool:
        """Whether a fault, not counted yet, is the second at one step."""
        return verdict.of_rank and len(self._with(verdict)) == _ELSEWHERE_FAULTS

    def fail(self, verdict: Verdict) -> str | None:
        """Count a fault; what to tell the user, where continuing is pointless."""
        if not verdict.leaves:  # nothing is lost then
            self._failures += 1
        self._alike = self._with(verdict)
        forward = self.best > self._best_at_fault or self._began > self._began_at_fault
        self._fruitless = 1 if forward else self._fruitless + 1
        self._best_at_fault = max(self.best, self._best_at_fault)
        self._began_at_fault = max(self._began, self._began_at_fault)
        if verdict.of_rank and len(self._alike) >= _MOST_FAULTS:
            return _of_one_step(self._alike)
        if self._fruitless < _MOST_FAULTS:
            return None
        where = f"step {self.best}" if self.best >= 0 else "the first step"
        return (
            f"the run failed {self._fruitless} times without getting beyond {where}; the last "
            f"time {verdict.text}"
        )

    def _with(self, verdict: Verdict) -> list[Verdict]:
        """The faults in a row at one step, or at one record of the data, with this one."""
        if not verdict.of_rank:
            return self._alike
        if self._alike and _are_alike(self._alike[-1], verdict):
            return [*self._alike, verdict]
        return [verdict]


def _are_alike(one: Verdict, other: Verdict) -> bool:
    if one.record >= 0 and (one.part, one.record) == (other.part, other.record):
        return True
    return one.step == other.step and (one.step >= 0 or one.rank == other.rank)


def _of_one_step(faults: list[Verdict]) -> str:
    """Which step failed, on which hosts, and how to leave its data out."""
    last = faults[-1]
    step = f"step {last.step}" if last.step >= 0 else "the start"
    places = dict.fromkeys(f"{each.host} (agent {each.agent})" for each in faults)
    text = (
        f"{step} failed {len(faults)} times, on {' and '.join(places)}; the last time {last.text}"
    )
    if last.phase == "evaluate":
        return text
    if last.record >= 0 and len({(each.part, each.record) for each in faults}) == 1:
        part = "" if last.part == "main" else f", part: {last.part}"
        return (
            f"{text}, each time while a transform had record {last.record} of the data's part "
            f"{last.part}. If that record is at fault, leave it out, beside those that "
            f"data.skip_records names already: --data.skip-records '[{{start: {last.record}, "
            f"stop: {last.record + 1}{part}}}]' --accept-changes data.skip_records"
        )
    if last.batch >= 0:
        return (
            f"{text}, with batch {last.batch}. If that batch is at fault, leave it out, beside "
            f"those that data.skip_steps names already: --data.skip-steps '[{{start: {last.batch}, "
            f"stop: {last.batch + 1}}}]' --accept-changes data.skip_steps"
        )
    return text
