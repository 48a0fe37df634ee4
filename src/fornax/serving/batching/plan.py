"""How many of the waiting rows one batch takes, so that all of them are through soonest.

Nine rows over buckets of 8 and 32 cost one run of 32, or one of 8 and one of 1: which is less
depends on the device, so the measured times decide.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence

__all__ = ["RowPlan"]

_WORTH = 0.9
"""Two runs instead of one must save this much: each has its price in the loop too."""


class RowPlan:
    """For each number of waiting rows, the rows of the next batch and the bucket they run in."""

    def __init__(self, buckets: Sequence[int], most: int, seconds: Mapping[int, float]):
        """`most` rows in a batch, at most the largest bucket; `seconds` a run of each takes."""
        self.buckets = tuple(sorted(buckets))
        self.most = min(most, self.buckets[-1])
        self._next = _cheapest(self.buckets, self.most, seconds)

    def rows(self, waiting: int) -> int:
        """How many of `waiting` rows (1 or more) the next batch should take."""
        return self._next[min(waiting, self.most)]

    def bucket(self, rows: int) -> int:
        """The smallest bucket that holds `rows`.

        Raises:
          IndexError: none does.
        """
        return self.buckets[bisect_left(self.buckets, rows)]


def _cheapest(buckets: Sequence[int], most: int, seconds: Mapping[int, float]) -> list[int]:
    """`next[n]`: rows to take first out of n, for the least sum of times over all n.

    A bucket never costs more than a larger one: where it was measured so, something was in the way.
    """
    seconds, cap = dict(seconds), float("inf")
    for bucket in reversed(buckets):
        seconds[bucket] = cap = min(cap, seconds[bucket])
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
    return first
