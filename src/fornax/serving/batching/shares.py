"""Whose turn a device is: the function that has used the least measured time for its weight.

Fair queueing after the fact: each function of a model carries the device time its batches took,
divided by its weight; the one with the least goes next. One that was idle begins at the least of
those that are busy, so that it has neither credit nor debt. With every function busy, the times two
of them got differ by no more than the longest batch of either, over its weight.
"""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

from fornax.serving.batching.queue import Queue

__all__ = ["Limit", "Share", "Shares"]


@dataclasses.dataclass(slots=True, eq=False)
class Limit:
    """Batches of one model under way on one device."""

    most: int
    running: int = 0


@dataclasses.dataclass(slots=True, eq=False)
class Share:
    """One function's claim on one device."""

    queue: Queue
    limit: Limit
    weight: float = 1.0
    used: float = 0.0
    """Seconds of the device over the weight, beside those of the others."""
    active: bool = False


S = TypeVar("S", bound=Share)


class Shares(Generic[S]):
    """The functions that share one device."""

    def __init__(self) -> None:
        self._every: list[S] = []
        self._clock = 0.0

    def __len__(self) -> int:
        return len(self._every)

    def add(self, share: S) -> None:
        """A function comes; its turn is no earlier than that of those here."""
        share.used = self._clock
        self._every.append(share)

    def remove(self, share: S) -> None:
        """A function leaves."""
        self._every.remove(share)

    def __iter__(self) -> Iterator[S]:
        return iter(self._every)

    def pick(self, now: float, among: Iterable[S] | None = None) -> S | None:
        """The function whose batch goes next, of those with one due and under their limit."""
        best = None
        for share in self._every if among is None else among:
            queue = share.queue
            if not queue.size:
                share.active = False
                continue
            if share.limit.running >= share.limit.most:
                continue
            due = queue.ready_at(now)
            if due is None or due > now:
                continue
            if not share.active:
                share.active = True
                share.used = max(share.used, self._clock)
            if best is None or share.used < best.used:
                best = share
        if best is not None:
            self._clock = max(self._clock, best.used)
        return best

    def next_due(self, now: float) -> float | None:
        """When a batch that is not due yet will be; None: nothing waits for time to pass."""
        soonest = None
        for share in self._every:
            if share.queue.size and share.limit.running < share.limit.most:
                due = share.queue.ready_at(now)
                if due is not None and due > now and (soonest is None or due < soonest):
                    soonest = due
        return soonest

    @staticmethod
    def charge(share: Share, seconds: float) -> None:
        """The device worked this long for a function; negative corrects an estimate."""
        share.used += seconds / share.weight
