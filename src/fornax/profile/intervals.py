"""Sets of moments as sorted, disjoint intervals of integer nanoseconds [N, 2]."""

import dataclasses
from collections.abc import Iterable

import numpy as np

from fornax.profile.facts import Ints


@dataclasses.dataclass(frozen=True, eq=False)
class Intervals:
    """Half-open intervals, sorted, none touching another."""

    begin: Ints
    end: Ints

    @classmethod
    def union(cls, begin: Ints, end: Ints) -> "Intervals":
        """All that any of some intervals covers; empty ones cover nothing."""
        whole = end > begin
        begin, end = begin[whole], end[whole]
        order = np.argsort(begin, kind="stable")
        begin, reach = begin[order], np.maximum.accumulate(end[order])
        if not len(begin):
            return cls(begin, reach)
        first = np.ones(len(begin), bool)
        first[1:] = begin[1:] > reach[:-1]
        last = np.append(np.flatnonzero(first)[1:], len(begin)) - 1
        return cls(begin[first], reach[last])

    @classmethod
    def all_of(cls, parts: Iterable["Intervals"]) -> "Intervals":
        """What any of several sets covers."""
        sets = list(parts)
        empty = np.zeros(0, np.int64)
        return cls.union(
            np.concatenate([empty, *(each.begin for each in sets)]),
            np.concatenate([empty, *(each.end for each in sets)]),
        )

    def without(self, other: "Intervals") -> "Intervals":
        """What this covers and `other` does not."""
        if not len(self.begin) or not len(other.begin):
            return self
        edges = np.unique(np.concatenate([self.begin, self.end, other.begin, other.end]))
        begin, end = edges[:-1], edges[1:]
        kept = self.holds(begin) & ~other.holds(begin)
        return Intervals.union(begin[kept], end[kept])

    def holds(self, times: Ints) -> np.ndarray:
        """Whether each time lies in it."""
        at = np.searchsorted(self.begin, times, side="right") - 1
        inside = at >= 0
        inside[inside] = times[inside] < self.end[at[inside]]
        return inside

    @property
    def length(self) -> int:
        """Nanoseconds that it covers."""
        return int((self.end - self.begin).sum())

    def within(self, begin: int, end: int) -> "Intervals":
        """What it covers of a window."""
        first = int(np.searchsorted(self.end, begin, side="right"))
        last = max(int(np.searchsorted(self.begin, end, side="left")), first)
        held = slice(first, last)
        return Intervals(np.maximum(self.begin[held], begin), np.minimum(self.end[held], end))

    def covered(self, begin: int, end: int) -> int:
        """Nanoseconds of a window that it covers."""
        return self.within(begin, end).length if end > begin else 0
