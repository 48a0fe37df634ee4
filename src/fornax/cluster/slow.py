"""Which worker holds the others up, of what each of them spends on a step by itself.

The collectives of a step make all workers equally slow, so steps are compared by what a worker did
while no collective held it: its wait for data, its own code, and in the devices' programs the time
that its processors worked or that the kernel kept them from it.
"""

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from fornax.cluster.messages import Observation

__all__ = ["Paces", "Slow"]

_CAUSES = ("waiting for data", "in its own code", "in the devices' programs")
_STEPS = 5
_SECONDS = 1.0
_SHARE = 1 / 3
_LEAST_SECONDS = 0.01
_APART_SECONDS = 0.05
_KEPT = 64


@dataclass(frozen=True, kw_only=True)
class Slow:
    """A worker without which the steps would be shorter; all in seconds per step."""

    rank: int
    own: float
    """What it spends by itself."""
    others: float
    """What the others do, their median."""
    step: float
    """How long steps take."""
    at_step: int
    """The step at which it was found."""
    cause: str
    """Where most of the difference is, in words."""

    @property
    def facts(self) -> dict[str, object]:
        """For a line of the events."""
        own, others, step = (round(each, 4) for each in (self.own, self.others, self.step))
        seconds = {"own_seconds": own, "others_seconds": others, "step_seconds": step}
        return {"at_step": self.at_step, **seconds}

    @property
    def text(self) -> str:
        """Without the rank."""
        more = self.own - self.others
        return (
            f"is slow: it holds each step up by {more:.3g} s of {self.step:.3g} s, {self.cause}; "
            f"it needs {self.own:.3g} s by itself, the others {self.others:.3g} s"
        )


@dataclass(frozen=True)
class _Pace:
    """What a worker had spent when it entered a step, in seconds since it began."""

    step: int
    at: float
    spent: tuple[float, float, float]
    """In data, code and programs."""


class Paces:
    """What the workers of an epoch spent, as they tell it."""

    def __init__(self) -> None:
        """Nothing is known."""
        self._paces: dict[int, deque[_Pace]] = {}
        self.named: Slow | None = None
        """The worker that was found to be slow, until it keeps up."""
        self._new = False

    def clear(self) -> None:
        """Forget the workers: others take over."""
        self._paces.clear()
        self.named = None

    def add(self, seen: Observation) -> None:
        """Take an observation of a worker."""
        known = self._paces.setdefault(seen.rank, deque(maxlen=_KEPT))
        spent = (seen.data_seconds, seen.code_seconds, seen.program_seconds)
        pace = _Pace(seen.entered_step, seen.entered_ns / 1e9, spent)
        last = known[-1] if known else _Pace(-1, 0.0, spent)
        if pace.step > last.step and pace.at > last.at + _APART_SECONDS:
            known.append(pace)
            self._new = True

    def judge(self) -> bool:
        """Look for a slow worker among all; whether `named` changed.

        Slow is who needs a third of the step more than the others, in the newest five steps and in
        the five before them, each at least a second. One that is named keeps up again when it
        needs less than a sixth more.
        """
        if not self._new:
            return False
        self._new = False
        before = None if self.named is None else self.named.rank
        halves = [_halves(known) for known in self._paces.values()]
        if len(halves) < 2 or not all(halves):
            return False
        newest = self._slowest([half[0] for half in halves])
        older = self._slowest([half[1] for half in halves])
        if newest is None or (older is not None and newest.rank == older.rank):
            self.named = newest
        return before != (None if self.named is None else self.named.rank)

    def _slowest(self, spans: Sequence[tuple[_Pace, _Pace]]) -> Slow | None:
        """The one that needs the most by itself, if that is much more than the others."""
        ranks = list(self._paces)
        spent = [_spent(*span) for span in spans]
        owns = [sum(each) for each in spent]
        slow = max(range(len(owns)), key=owns.__getitem__)
        rest = [n for n in range(len(owns)) if n != slow]
        usual = [statistics.median(spent[n][part] for n in rest) for part in range(3)]
        others = statistics.median(owns[n] for n in rest)
        first, last = spans[slow]
        step = (last.at - first.at) / (last.step - first.step)
        known = self.named is not None and self.named.rank == ranks[slow]
        if owns[slow] - others < max(_SHARE * step, _LEAST_SECONDS) * (0.5 if known else 1.0):
            return None
        more = [own - most for own, most in zip(spent[slow], usual, strict=True)]
        cause = _CAUSES[more.index(max(more))]
        return Slow(
            rank=ranks[slow],
            own=owns[slow],
            others=others,
            step=step,
            at_step=last.step,
            cause=cause,
        )


def _spent(first: _Pace, last: _Pace) -> list[float]:
    """Seconds per step in data, code and programs."""
    steps = last.step - first.step
    return [(b - a) / steps for a, b in zip(first.spent, last.spent, strict=True)]


def _halves(known: Sequence[_Pace]) -> list[tuple[_Pace, _Pace]]:
    """The newest span of enough steps and seconds, and that before it; none if one is missing."""
    spans: list[tuple[_Pace, _Pace]] = []
    for pace in reversed(known):
        last = spans[-1][0] if spans else known[-1]
        if last.step - pace.step >= _STEPS and last.at - pace.at >= _SECONDS:
            spans.append((pace, last))
            if len(spans) == 2:
                return spans
    return []
