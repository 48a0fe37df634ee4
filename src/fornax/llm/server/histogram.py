"""Counters and histograms that one thread writes and the scraper reads, cheap enough per token."""

from bisect import bisect_left
from collections.abc import Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

__all__ = ["Counter", "Gauge", "Histogram", "powers"]


def powers(highest: int) -> list[float]:
    """1, 2, 5, 10, 20, 50, … up to `highest`."""
    bounds: list[float] = []
    scale = 1
    while scale <= highest:
        bounds += [float(scale * step) for step in (1, 2, 5) if scale * step <= highest]
        scale *= 10
    return bounds


class Histogram:
    """Observations by size. `observe` is one bisection: no lock, as one thread writes."""

    def __init__(self, name: str, text: str, bounds: Sequence[float]):
        self.name, self.text = name, text
        self._bounds = list(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def family(self, names: Sequence[str], labels: Sequence[str]) -> HistogramMetricFamily:
        """As Prometheus reads it."""
        running, buckets = 0, []
        for bound, count in zip([*self._bounds, float("inf")], self._counts, strict=True):
            running += count
            buckets.append((_number(bound), float(running)))
        family = HistogramMetricFamily(self.name, self.text, labels=names)
        family.add_metric(labels, buckets, self._sum)
        return family


class _Values:
    """Numbers by the values of further labels."""

    def __init__(self, name: str, text: str, labels: Sequence[str] = ()):
        self.name, self.text = name, text
        self.labels = tuple(labels)
        self.values: dict[tuple[str, ...], float] = {} if labels else {(): 0.0}


class Counter(_Values):
    """A number that grows."""

    def add(self, amount: float, *labels: str) -> None:
        """Grow it."""
        self.values[labels] = self.values.get(labels, 0.0) + amount

    def family(self, names: Sequence[str], labels: Sequence[str]) -> CounterMetricFamily:
        """As Prometheus reads it."""
        family = CounterMetricFamily(self.name, self.text, labels=[*names, *self.labels])
        for own, value in list(self.values.items()):
            family.add_metric([*labels, *own], value)
        return family


class Gauge(_Values):
    """A number that goes up and down."""

    def set(self, value: float, *labels: str) -> None:
        """Set it."""
        self.values[labels] = value

    def family(self, names: Sequence[str], labels: Sequence[str]) -> GaugeMetricFamily:
        """As Prometheus reads it."""
        family = GaugeMetricFamily(self.name, self.text, labels=[*names, *self.labels])
        for own, value in list(self.values.items()):
            family.add_metric([*labels, *own], value)
        return family


def _number(bound: float) -> str:
    return "+Inf" if bound == float("inf") else str(bound)
