"""Statistics beside SciPy's."""

import numpy as np
import scipy.stats

from fornax.config.statistics import benjamini_hochberg, bootstrap


def test_adjusted_p_values_are_scipys():
    p_M = np.random.default_rng(0).random(50) ** 3
    np.testing.assert_allclose(
        benjamini_hochberg(p_M), scipy.stats.false_discovery_control(p_M), rtol=1e-12
    )


def test_an_interval_covers_as_often_as_it_says():
    rng = np.random.default_rng(1)
    covered = 0
    for seed in range(100):
        x_N = rng.exponential(size=60)
        low, high = bootstrap(lambda picks, x_N=x_N: x_N[picks].mean(axis=1), 60, seed=seed)
        covered += low <= 1.0 <= high
    assert 85 <= covered <= 99
