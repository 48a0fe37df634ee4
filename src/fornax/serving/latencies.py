"""How long requests took: a histogram a version for Prometheus, and percentiles for a report."""

import math
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping

from fornax.serving.events import Outcome, StateChange
from fornax.serving.types import InferRequest, InferResult

__all__ = ["BOUNDS", "Latencies", "Percentiles"]

BOUNDS = tuple(step * 10.0**scale for scale in range(-4, 2) for step in (1, 2.5, 5))[:-2]
"""Upper ends in seconds: 0.1 ms to 10 s."""


class Latencies:
    """Counts requests answered by their time; `finished` and `changed` are listeners."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], list[int]] = {}
        self._sums: dict[tuple[str, str], float] = {}

    def finished(self, request: InferRequest, outcome: Outcome) -> None:
        """A request has its answer or its error."""
        if not isinstance(outcome, InferResult) or not request.received:
            return
        seconds = time.monotonic() - request.received
        key = (request.model, outcome.version)
        counts = self._counts.get(key)
        if counts is None:
            counts = self._counts[key] = [0] * (len(BOUNDS) + 1)
            self._sums[key] = 0.0
        counts[bisect_left(BOUNDS, seconds)] += 1
        self._sums[key] += seconds

    def changed(self, change: StateChange) -> None:
        """A version that is gone is forgotten, as its other counters are."""
        if change.state == "UNAVAILABLE":
            self._counts.pop((change.name, change.version), None)
            self._sums.pop((change.name, change.version), None)

    def __iter__(self) -> Iterator[tuple[str, str, list[int], float]]:
        """Model, version, counts by bucket, seconds summed."""
        for (model, version), counts in list(self._counts.items()):
            yield model, version, counts, self._sums[model, version]


class Percentiles:
    """Durations in buckets a tenth apart, so that percentiles cost no memory.

    The bounds of `Latencies`, few enough to be scraped, lie too far apart for that.
    """

    _BASE = math.log(1.1)

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self._number = 0
        self._sum = 0

    def add(self, nanoseconds: int) -> None:
        """Take in one duration."""
        self._counts[int(math.log(max(nanoseconds, 1)) / self._BASE)] += 1
        self._number += 1
        self._sum += nanoseconds

    def quantile(self, share: float) -> float:
        """Microseconds under which so many of the durations are, within a tenth; 0 for none."""
        left = share * self._number
        for bucket in sorted(self._counts):
            left -= self._counts[bucket]
            if left <= 0:
                return math.exp((bucket + 1) * self._BASE) / 1000
        return 0.0

    def report(self) -> Mapping[str, float]:
        """Microseconds: mean, median, and the slowest hundredth's border."""
        mean = self._sum / self._number / 1000 if self._number else 0.0
        return {
            "mean_us": round(mean, 1),
            "p50_us": round(self.quantile(0.5), 1),
            "p99_us": round(self.quantile(0.99), 1),
        }
