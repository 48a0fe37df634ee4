"""Estimates against closed forms, intervals against their promise."""

import itertools
import math

import numpy as np
import pytest

from fornax.config.errors import ConfigError
from fornax.evaluate import Estimate, pass_at_k, ratio, share
from fornax.evaluate.statistics import mean, sign_test


@pytest.mark.parametrize(("n", "c", "k"), [(1, 0, 1), (5, 2, 1), (5, 2, 3), (6, 5, 2), (4, 4, 4)])
def test_pass_at_k_is_the_share_of_draws_of_k_with_a_pass(n: int, c: int, k: int) -> None:
    draws = list(itertools.combinations([True] * c + [False] * (n - c), k))
    expected = sum(any(draw) for draw in draws) / len(draws)
    assert pass_at_k([n], [c], k).value == pytest.approx(expected, abs=1e-12)


def test_pass_at_k_is_the_mean_over_problems_of_unlike_counts() -> None:
    assert pass_at_k([4, 8], [1, 0], 2).value == pytest.approx(0.25)
    assert pass_at_k([1000], [1], 100).value == pytest.approx(0.1)


@pytest.mark.parametrize("k", [0, 3])
def test_a_k_beyond_the_samples_is_refused(k: int) -> None:
    with pytest.raises(ConfigError, match=f"k={k} must be from 1 to the 2 samples"):
        pass_at_k([4, 2], [1, 1], k)


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    generator = np.random.default_rng(3)
    held = 0
    for trial in range(200):
        found = mean(generator.exponential(2.0, 60), confidence=0.9, seed=trial)
        held += found.low <= 2.0 <= found.high
    assert 0.82 <= held / 200 <= 0.96


def test_a_ratio_weighs_documents_by_their_size() -> None:
    found = ratio([10.0, 1.0], [10.0, 4.0])
    assert found.value == pytest.approx(11 / 14)
    assert (found.low, found.high) == pytest.approx((0.25, 1.0))


def test_nothing_or_everything_is_not_certain() -> None:
    none, every = share([0.0] * 20), share([1.0] * 20)
    assert (none.low, none.high) == (0.0, pytest.approx(1 - 0.025 ** (1 / 20)))
    assert (every.low, every.high) == (pytest.approx(0.025 ** (1 / 20)), 1.0)


def test_one_problem_has_no_interval_and_none_no_value() -> None:
    assert str(mean([0.5])) == "0.5"
    assert math.isnan(mean([]).value)
    assert math.isnan(mean([math.nan]).value)
    assert mean([1.0, math.nan, 3.0]).value == 2.0
    assert str(Estimate(0.5, 0.25, 0.75)) == "0.5 [0.25, 0.75]"


def test_intervals_repeat() -> None:
    values = np.random.default_rng(0).normal(size=50)
    assert mean(values, seed=1) == mean(values, seed=1) != mean(values, seed=2)


def test_the_sign_test_is_the_binomial_tail() -> None:
    assert sign_test(0, 0) == 1.0
    assert sign_test(3, 3) == 1.0
    assert sign_test(5, 0) == sign_test(0, 5) == pytest.approx(2 / 32)
    assert sign_test(8, 2) == pytest.approx(2 * (45 + 10 + 1) / 1024)
