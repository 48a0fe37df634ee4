"""Schedules are what Optax computes, and refuse runs they do not fit."""

import itertools
import math

import numpy as np
import optax
import pytest

from fornax.config.errors import ConfigError
from fornax.optim import WSD, Constant, Cosine, Linear, Piecewise, build_schedule

PEAK = 0.3


def values(config, total_steps=100):
    schedule = build_schedule(config, peak=PEAK, total_steps=total_steps)
    return np.array([schedule(step) for step in range(total_steps + 1)], np.float32)


def of_optax(schedule, total_steps=100):
    return np.array([schedule(step) for step in range(total_steps + 1)], np.float32)


def test_cosine_is_optax_warmup_cosine():
    mine = values(Cosine(warmup_steps=10, end_factor=0.1))
    theirs = of_optax(optax.warmup_cosine_decay_schedule(0.0, PEAK, 10, 100, end_value=PEAK * 0.1))
    np.testing.assert_array_equal(mine, theirs)


def test_linear_is_optax_linear_after_warmup():
    mine = values(Linear(warmup_steps=20))
    theirs = of_optax(
        optax.join_schedules(
            [optax.linear_schedule(0.0, PEAK, 20), optax.linear_schedule(PEAK, 0.0, 80)], [20]
        )
    )
    np.testing.assert_array_equal(mine, theirs)
    assert mine[-1] == 0


def test_constant_warms_up_and_stays():
    mine = values(Constant(warmup_steps=4))
    np.testing.assert_allclose(mine[:5], PEAK * np.arange(5) / 4, rtol=1e-6)
    assert set(mine[4:].tolist()) == {np.float32(PEAK)}


@pytest.mark.parametrize("decay", ["linear", "cosine", "sqrt"])
def test_wsd_is_flat_between_warmup_and_decay(decay):
    mine = values(WSD(warmup_steps=10, decay_steps=30, end_factor=0.2, decay=decay))
    assert mine[0] == 0
    np.testing.assert_allclose(mine[10:71], PEAK, rtol=1e-6)
    assert all(a > b for a, b in itertools.pairwise(mine[70:]))
    np.testing.assert_allclose(mine[-1], PEAK * 0.2, rtol=1e-6)


def test_wsd_sqrt_follows_one_minus_sqrt():
    mine = values(WSD(decay_steps=16, decay="sqrt"))
    np.testing.assert_allclose(mine[84 + 4], PEAK * (1 - math.sqrt(4 / 16)), rtol=1e-6)


def test_wsd_takes_the_last_fifth_by_default():
    mine = values(WSD(warmup_steps=10))
    assert mine[80] == np.float32(PEAK)
    assert mine[81] < mine[80]


def test_piecewise_holds_each_factor():
    mine = values(Piecewise(warmup_steps=10, boundaries=(40, 70), factors=(1.0, 0.5, 0.0)))
    assert mine[39] == np.float32(PEAK)
    assert mine[40] == mine[69] == np.float32(PEAK * 0.5)
    assert mine[70] == mine[100] == 0


def test_piecewise_linear_draws_lines():
    mine = values(
        Piecewise(
            warmup_steps=10, boundaries=(30, 50), factors=(1.0, 0.5, 0.1), interpolate="linear"
        )
    )
    np.testing.assert_allclose(mine[20], PEAK * 0.75, rtol=1e-6)
    np.testing.assert_allclose(mine[40], PEAK * 0.3, rtol=1e-6)
    np.testing.assert_allclose(mine[[50, 100]], PEAK * 0.1, rtol=1e-6)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Cosine(warmup_steps=-1), "warmup_steps=-1"),
        (lambda: Linear(end_factor=1.5), "end_factor=1.5"),
        (lambda: WSD(decay_steps=0), "decay_steps=0"),
        (lambda: Piecewise(boundaries=(3,)), "1 factors do not fit 1 boundaries"),
        (lambda: Piecewise(boundaries=(9, 3), factors=(1, 1, 1)), "must rise"),
        (
            lambda: Piecewise(warmup_steps=5, boundaries=(5,), factors=(1, 1)),
            "start after warmup_steps=5",
        ),
        (lambda: Piecewise(factors=(-1.0,)), "negative"),
    ],
)
def test_wrong_values_are_refused(make, says):
    with pytest.raises(ConfigError, match=says):
        make()


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (Cosine(warmup_steps=50), "warmup_steps=50 fills the whole run of 50 steps"),
        (WSD(warmup_steps=20, decay_steps=40), "do not fit into 50 steps"),
    ],
)
def test_a_schedule_longer_than_the_run_is_refused(config, says):
    with pytest.raises(ConfigError, match=says):
        build_schedule(config, peak=1.0, total_steps=50)
