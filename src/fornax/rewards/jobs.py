"""How samples are divided among workers, and who is to blame when a worker fails."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from fornax.rewards.process import Loaded

__all__ = ["STATE_SLOT", "Job", "divide"]

STATE_SLOT = 0
"""The worker that runs functions with state: those of one module share theirs."""

_CHUNKS_PER_WORKER = 4
_GRACE_SECONDS = 1.0


@dataclass
class Job:
    """Some samples for one function on one worker."""

    place: int
    """Which function."""
    numbers: list[int]
    """Samples not answered yet, in order."""
    in_turn: bool
    """Whether the worker calls the function for one sample after the other."""
    started: float = 0.0
    """When the call that runs now began, by the monotonic clock."""
    pinned: int | None = None
    """The one worker that may run it: functions with state stay where their state is."""
    fault: str = field(default="", kw_only=True)
    """What is wrong with the call as a whole."""

    def answered(self, number: int, now: float) -> None:
        """Note an answer; in turn, the next call begins with it."""
        self.numbers.remove(number)
        if self.in_turn:
            self.started = now

    def deadline(self, limit: float) -> float:
        """When the call has taken too long; async calls are given time to notice it themselves."""
        return self.started + limit + (0.0 if self.in_turn else _GRACE_SECONDS)

    def blame(self) -> tuple[list[int], list["Job"]]:
        """After a failure: the samples that caused it, and jobs for those that may be innocent.

        When several calls ran at once, or one call for several samples, each is tried alone.
        """
        if self.in_turn:
            rest = self.numbers[1:]
            again = [Job(self.place, rest, True, pinned=self.pinned)] if rest else []
            return self.numbers[:1], again
        if len(self.numbers) <= 1:
            return self.numbers, []
        return [], [Job(self.place, [n], False, pinned=self.pinned) for n in self.numbers]


def divide(functions: Sequence[Loaded], count: int, workers: int) -> list[Job]:
    """The jobs for `count` samples.

    A function called for one sample at a time has its samples in chunks, async ones in one chunk
    for each worker, batched ones and those with state all at once.
    """
    jobs = []
    for place, function in enumerate(functions):
        in_turn = not (function.batched or function.is_async)
        if function.has_state or function.batched:
            size = count
        elif function.is_async:
            size = -(-count // workers)
        else:
            size = min(64, -(-count // (workers * _CHUNKS_PER_WORKER)))
        pinned = STATE_SLOT if function.has_state else None
        for first in range(0, count, max(1, size)):
            numbers = list(range(first, min(count, first + size)))
            jobs.append(Job(place, numbers, in_turn, pinned=pinned))
    return jobs
