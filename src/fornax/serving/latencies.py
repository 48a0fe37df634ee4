"""How long requests took, as a histogram a version: what percentiles are made of."""

import time
from bisect import bisect_left
from collections.abc import Iterator

from fornax.serving.events import Outcome, StateChange
from fornax.serving.types import InferRequest, InferResult

__all__ = ["BOUNDS", "Latencies"]

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
