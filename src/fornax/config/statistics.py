"""Estimates with intervals, and many tests at once. NumPy only.

Legend: N observations, R resamples, M tests.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 2000
_CHUNK = 1 << 22


@dataclass(frozen=True)
class Estimate:
    """A number and the interval it is believed to lie in."""

    value: float
    low: float
    """NaN, as `high`, where there is one observation only."""
    high: float

    def __str__(self) -> str:
        if math.isnan(self.low):
            return f"{self.value:.4g}"
        return f"{self.value:.4g} [{self.low:.4g}, {self.high:.4g}]"


def resamples(size: int, *, count: int = RESAMPLES, seed: int = 0) -> Iterator[NDArray[np.int64]]:
    """Positions of `count` samples of N with replacement out of N, in chunks [R, N].

    The bootstrap of Efron 1979; the same size and seed give the same samples.
    """
    generator = np.random.default_rng(seed)
    while count:
        rows = min(count, max(1, _CHUNK // size))
        yield generator.integers(0, size, (rows, size))
        count -= rows


def bootstrap(
    statistic: Callable[[NDArray[np.int64]], NDArray[np.float64]],
    size: int,
    *,
    confidence: float = 0.95,
    seed: int = 0,
) -> tuple[float, float]:
    """The percentile bootstrap's interval of a statistic of N observations.

    Args:
      statistic: from positions [R, N] to its values [R]; NaN is left out.
      size: N.
      confidence: of the interval, between 0 and 1.
      seed: of the resamples.
    """
    values = np.concatenate([statistic(picks_RN) for picks_RN in resamples(size, seed=seed)])
    return interval(values, confidence)


def interval(values_R: NDArray[np.float64], confidence: float = 0.95) -> tuple[float, float]:
    """The middle part of the values that holds `confidence` of them; NaN is left out."""
    tail = (1 - confidence) / 2
    low, high = np.nanquantile(values_R, [tail, 1 - tail])
    return float(low), float(high)


def benjamini_hochberg(p_values_M: Sequence[float] | NDArray[np.float64]) -> NDArray[np.float64]:
    """Adjusted p-values: those up to q are the tests to reject at a false discovery rate of q.

    Benjamini and Hochberg, "Controlling the False Discovery Rate", 1995.
    """
    p_M = np.asarray(p_values_M, np.float64)
    order = np.argsort(p_M)[::-1]
    scaled = p_M[order] * p_M.size / np.arange(p_M.size, 0, -1)
    adjusted_M = np.empty_like(p_M)
    adjusted_M[order] = np.minimum(1.0, np.minimum.accumulate(scaled))
    return adjusted_M
