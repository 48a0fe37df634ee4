"""Estimates and their intervals: ratios, pass@k, win rates. NumPy only.

Legend: N problems (or documents, or prompts), R resamples.
"""

import math
from collections.abc import Sequence

import numpy as np

from fornax.config.errors import ConfigError
from fornax.config.statistics import Estimate, bootstrap

__all__ = ["Estimate", "mean", "pass_at_k", "ratio", "share", "sign_test"]


def ratio(
    numerators_N: Sequence[float] | np.ndarray,
    denominators_N: Sequence[float] | np.ndarray,
    *,
    confidence: float = 0.95,
    seed: int = 0,
) -> Estimate:
    """Sum over sum, with the percentile bootstrap's interval over problems (Efron 1979).

    Args:
      numerators_N: such as the nats of each document.
      denominators_N: such as its bytes.
      confidence: of the interval, between 0 and 1.
      seed: of the resamples; the same problems and seed give the same interval.
    """
    a_N = np.asarray(numerators_N, np.float64)
    b_N = np.asarray(denominators_N, np.float64)
    if not a_N.size or not b_N.sum():
        return Estimate(math.nan, math.nan, math.nan)
    value = float(a_N.sum() / b_N.sum())
    if a_N.size == 1:
        return Estimate(value, math.nan, math.nan)

    def ratios(picks_RN: np.ndarray) -> np.ndarray:
        with np.errstate(invalid="ignore", divide="ignore"):
            return a_N[picks_RN].sum(axis=1) / b_N[picks_RN].sum(axis=1)

    return Estimate(value, *bootstrap(ratios, a_N.size, confidence=confidence, seed=seed))


def mean(
    values_N: Sequence[float] | np.ndarray, *, confidence: float = 0.95, seed: int = 0
) -> Estimate:
    """The mean of values that are not NaN, with the bootstrap's interval."""
    kept = np.asarray(values_N, np.float64)
    kept = kept[~np.isnan(kept)]
    return ratio(kept, np.ones_like(kept), confidence=confidence, seed=seed)


def share(
    values_N: Sequence[float] | np.ndarray, *, confidence: float = 0.95, seed: int = 0
) -> Estimate:
    """The mean of values from 0 to 1.

    Where all are 0 or all are 1 every resample is the same, which would claim certainty: the other
    end is then the exact one of Clopper and Pearson (1934).
    """
    found = mean(values_N, confidence=confidence, seed=seed)
    count = len(values_N)
    if found.value in (0.0, 1.0) and count:
        reach = 1 - ((1 - confidence) / 2) ** (1 / count)
        return Estimate(found.value, *((0.0, reach) if found.value == 0 else (1 - reach, 1.0)))
    return found


def pass_at_k(
    samples_N: Sequence[int],
    passed_N: Sequence[int],
    k: int,
    *,
    confidence: float = 0.95,
    seed: int = 0,
) -> Estimate:
    """The chance that one of k samples passes: 1 - C(n - c, k) / C(n, k), without bias.

    Chen et al., "Evaluating Large Language Models Trained on Code", 2021; the interval is the
    bootstrap's over problems.

    Args:
      samples_N: samples drawn for each problem, n.
      passed_N: how many of them passed, c.
      k: at most the smallest n.
      confidence: of the interval.
      seed: of the resamples.

    Raises:
      ConfigError: k is not from 1 to n.

    Example:
      pass_at_k([4, 4], [1, 0], k=2).value  # (1/2 + 0) / 2
    """
    fewest = min(samples_N, default=0)
    if not 1 <= k <= fewest:
        raise ConfigError(f"k={k} must be from 1 to the {fewest} samples of a problem")
    values = [_passes(n, c, k) for n, c in zip(samples_N, passed_N, strict=True)]
    return share(values, confidence=confidence, seed=seed)


def _passes(samples: int, passed: int, k: int) -> float:
    if samples - passed < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(samples - passed + 1, samples + 1))


def sign_test(wins: int, losses: int) -> float:
    """The chance of a lead at least this large, either way, between equals; ties left out."""
    count, most = wins + losses, max(wins, losses)
    if not count:
        return 1.0
    tail = sum(math.comb(count, n) for n in range(most, count + 1))
    return min(1.0, 2 * tail / 2**count)
