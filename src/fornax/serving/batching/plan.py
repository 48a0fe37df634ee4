"""How many of the waiting rows one batch takes, so that all of them are through soonest.

Nine rows over buckets of 8 and 32 cost one run of 32, or one of 8 and one of 1: which is less
depends on the device, so the measured times decide.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence

__all__ = ["RowPlan"]

_WORTH = 0.9
"""Two runs instead of one must save this much: each has its price in the loop too."""
_TABLE = 1024
"""Up to this many rows each number has its own entry, made when the plan is: that is a
millisecond's work, where 100,000 took a tenth of a second. Above, the few candidates are compared
when asked."""


class RowPlan:
    """For each number of waiting rows, the rows of the next batch and the bucket they run in."""

    def __init__(self, buckets: Sequence[int], most: int, seconds: Mapping[int, float]):
        """`most` rows in a batch, at most the largest bucket; `seconds` a run of each takes."""
        self.buckets = tuple(sorted(buckets))
        self.most = min(most, self.buckets[-1])
        self._seconds = _rising(self.buckets, seconds)
        self._total, self._next = _cheapest(self.buckets, min(self.most, _TABLE), self._seconds)

    def rows(self, waiting: int) -> int:
        """How many of `waiting` rows (1 or more) the next batch should take."""
        rows = min(waiting, self.most)
        return self._next[rows] if rows < len(self._next) else self._many(rows)

    def _many(self, rows: int) -> int:
        """As few runs of one full bucket as lead back into the table, or one run for all."""
        best, take = self._seconds[self.bucket(rows)], rows
        for full in reversed(self.buckets):
            if full < rows:
                runs = min(-((_TABLE - rows) // full), rows // full)
                rest = rows - runs * full
                last = self._total[rest] if rest <= _TABLE else self._seconds[self.bucket(rest)]
                if runs * self._seconds[full] + last < best:
                    best, take = runs * self._seconds[full] + last, full
        return take

    def bucket(self, rows: int) -> int:
        """The smallest bucket that holds `rows`.

        Raises:
          IndexError: none does.
        """
        return self.buckets[bisect_left(self.buckets, rows)]


def _rising(buckets: Sequence[int], seconds: Mapping[int, float]) -> dict[int, float]:
    """A bucket never costs more than a larger one: where it was so, something was in the way."""
    found, cap = {}, float("inf")
    for bucket in reversed(buckets):
        found[bucket] = cap = min(cap, seconds[bucket])
    return found


def _cheapest(
    buckets: Sequence[int], most: int, seconds: Mapping[int, float]
) -> tuple[list[float], list[int]]:
    """For each n, the least sum of times over all n rows, and the rows to take first for it."""
    total, first = [0.0], [0]
    for rows in range(1, most + 1):
        best, take = seconds[buckets[bisect_left(buckets, rows)]], rows
        for full in reversed(buckets):
            if full >= rows:
                continue
            cost = seconds[full] + total[rows - full]
            if cost < _WORTH * best:
                best, take = cost, full
        total.append(best)
        first.append(take)
    return total, first
