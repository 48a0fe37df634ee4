"""Preference losses against float64 formulas, their gradients against finite differences.

Legend: P pairs; an axis of 2 holds the chosen and the rejected completion; B completions.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fornax.config.errors import ConfigError
from fornax.tune import losses

_RNG = np.random.default_rng(0)
SUMS_P2, REF_P2 = -5 + 4 * _RNG.normal(size=(2, 6, 2))
AVG_P2, REF_AVG_P2 = -_RNG.uniform(0.05, 3.0, size=(2, 6, 2))
SCORES_P2 = _RNG.normal(size=(6, 2))
MARGIN_P = _RNG.uniform(size=6)
DESIRABLE_B = np.array([True, False, True, True, False, False])


def _log_sigmoid(x: np.ndarray) -> np.ndarray:
    return -np.log1p(np.exp(-x))


def _gap(x_P2: np.ndarray) -> np.ndarray:
    return x_P2[:, 0] - x_P2[:, 1]


def _smooth(m: np.ndarray, e: float) -> np.ndarray:
    return -(1 - e) * _log_sigmoid(m) - e * _log_sigmoid(-m)


def _robust(x: np.ndarray) -> np.ndarray:
    m = 0.3 * _gap(x - REF_P2)
    return (-0.8 * _log_sigmoid(m) + 0.2 * _log_sigmoid(-m)) / 0.6


def _orpo(x: np.ndarray) -> np.ndarray:
    return -0.2 * _log_sigmoid(_gap(np.log(np.exp(x) / (1 - np.exp(x)))))


def _kto(x: np.ndarray) -> np.ndarray:
    h = x[:, 0] - REF_P2[:, 0]
    good, bad = 1.5 / (1 + np.exp(0.3 * (h - 0.4))), 0.5 / (1 + np.exp(0.3 * (0.4 - h)))
    return np.where(DESIRABLE_B, good, bad)


def _run_kto(x_P2: jax.Array) -> Any:
    weights = {"desirable_weight": 1.5, "undesirable_weight": 0.5}
    return losses.kto(x_P2[:, 0], REF_P2[:, 0], jnp.asarray(DESIRABLE_B), 0.4, beta=0.3, **weights)


def _centred(x: np.ndarray) -> np.ndarray:
    return -_log_sigmoid(_gap(x) - MARGIN_P) + 0.05 * x.sum(1) ** 2


# name: (ours, the formula, where)
CASES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any], np.ndarray]] = {
    "dpo": (
        lambda x: losses.dpo(x, REF_P2, beta=0.3),
        lambda x: _smooth(0.3 * _gap(x - REF_P2), 0),
        SUMS_P2,
    ),
    "cdpo": (
        lambda x: losses.dpo(x, REF_P2, beta=0.3, label_smoothing=0.1),
        lambda x: _smooth(0.3 * _gap(x - REF_P2), 0.1),
        SUMS_P2,
    ),
    "robust": (
        lambda x: losses.robust_dpo(x, REF_P2, beta=0.3, label_smoothing=0.2),
        _robust,
        SUMS_P2,
    ),
    "ipo": (
        lambda x: losses.ipo(x, REF_AVG_P2, beta=0.3),
        lambda x: (_gap(x - REF_AVG_P2) - 1 / 0.6) ** 2,
        AVG_P2,
    ),
    "simpo": (
        lambda x: losses.simpo(x, beta=2.0, gamma=0.7),
        lambda x: _smooth(2 * _gap(x) - 0.7, 0),
        AVG_P2,
    ),
    "orpo": (lambda x: losses.orpo(x, beta=0.2), _orpo, AVG_P2),
    "cpo": (
        lambda x: losses.cpo(x, beta=0.2, label_smoothing=0.1),
        lambda x: _smooth(0.2 * _gap(x), 0.1),
        SUMS_P2,
    ),
    "kto": (_run_kto, _kto, SUMS_P2),
    "bradley_terry": (
        losses.bradley_terry,
        lambda x: -_log_sigmoid(_gap(x)),
        SCORES_P2,
    ),
    "bradley_terry with a margin, centred": (
        lambda x: losses.bradley_terry(x, jnp.asarray(MARGIN_P), centre=0.05),
        _centred,
        SCORES_P2,
    ),
}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """Loss, metrics and the gradient of the summed loss, of all cases in one program."""

    def all_cases(given: dict[str, jax.Array]) -> dict[str, Any]:
        def value(run: Any, x: jax.Array) -> tuple[jax.Array, Any]:
            loss, metrics = run(x)
            return jnp.sum(loss), (loss, metrics)

        return {
            name: jax.grad(lambda x, run=run: value(run, x), has_aux=True)(given[name])
            for name, (run, _, _) in CASES.items()
        }

    with jax.enable_x64(True):
        given = {name: x for name, (_, _, x) in CASES.items()}
        return jax.tree.map(np.asarray, jax.jit(all_cases)(given))


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_are_the_formula(name: str, found: dict[str, Any]) -> None:
    _, formula, x = CASES[name]
    slope, (loss, _) = found[name]
    assert loss.dtype == np.float64
    np.testing.assert_allclose(loss, formula(x), rtol=1e-12)
    expected = np.zeros_like(x)
    for place in np.ndindex(*x.shape):
        step = np.zeros_like(x)
        step[place] = 1e-6
        expected[place] = (formula(x + step).sum() - formula(x - step).sum()) / 2e-6
    np.testing.assert_allclose(slope, expected, atol=1e-8)


def test_metrics_are_rewards_and_how_often_they_are_right(found: dict[str, Any]) -> None:
    _, (_, metrics) = found["dpo"]
    rewards_P2 = 0.3 * (SUMS_P2 - REF_P2)
    np.testing.assert_allclose(metrics["reward_chosen"], rewards_P2[:, 0])
    np.testing.assert_allclose(metrics["reward_rejected"], rewards_P2[:, 1])
    np.testing.assert_allclose(metrics["reward_margin"], _gap(rewards_P2))
    np.testing.assert_array_equal(metrics["accuracy"], _gap(rewards_P2) > 0)


def test_a_policy_that_is_its_reference_loses_log_two() -> None:
    loss, metrics = losses.dpo(jnp.asarray(SUMS_P2), jnp.asarray(SUMS_P2))
    np.testing.assert_allclose(loss, np.log(2), rtol=1e-6)
    np.testing.assert_array_equal(metrics["accuracy"], 0)


def test_robust_dpo_is_unbiased_under_flipped_labels() -> None:
    flipped = SUMS_P2[:, ::-1], REF_P2[:, ::-1]
    e = 0.2
    right, _ = losses.robust_dpo(SUMS_P2, REF_P2, label_smoothing=e)
    wrong, _ = losses.robust_dpo(*flipped, label_smoothing=e)
    plain, _ = losses.dpo(SUMS_P2, REF_P2)
    np.testing.assert_allclose((1 - e) * right + e * wrong, plain, rtol=1e-5)


def test_orpo_takes_averages_for_sums_carry_no_odds() -> None:
    """With sums 1 - p is 1: the log-odds would be the log-probabilities, whatever the odds."""
    lengths_P2 = np.array([[10, 40], [25, 5]])
    averages_P2 = losses.average(jnp.asarray([[-2.0, -60.0], [-15.0, -1.5]]), lengths_P2)
    np.testing.assert_allclose(averages_P2, [[-0.2, -1.5], [-0.6, -0.3]], rtol=1e-6)
    p_P2 = np.exp(averages_P2)
    _, metrics = losses.orpo(averages_P2)
    np.testing.assert_allclose(
        metrics["log_odds_ratio"], _gap(np.log(p_P2 / (1 - p_P2))), rtol=1e-5
    )


def test_orpo_stays_finite_where_a_completion_is_certain() -> None:
    slope = jax.grad(lambda x: jnp.sum(losses.orpo(x)[0]))(jnp.array([[-1e-9, -1.0], [-90.0, 0.0]]))
    assert np.isfinite(slope).all()


def test_kto_baseline_is_a_mean_that_never_falls_below_zero() -> None:
    policy_B, ref_B = jnp.array([1.0, 3.0, 9.0]), jnp.array([0.0, 1.0, 0.0])
    assert losses.kto_kl(policy_B, ref_B, jnp.array([1.0, 1.0, 0.0])) == 1.5
    assert losses.kto_kl(ref_B, policy_B) == 0
    slope = jax.grad(lambda p: losses.kto_kl(p, ref_B))(policy_B)
    np.testing.assert_array_equal(slope, 0)


def test_low_precision_is_widened() -> None:
    loss, _ = losses.dpo(jnp.asarray(SUMS_P2, jnp.bfloat16), jnp.asarray(REF_P2, jnp.bfloat16))
    assert loss.dtype == jnp.float32


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: losses.dpo(SUMS_P2, REF_P2, beta=0.0), "beta=0.0 must be above 0"),
        (lambda: losses.robust_dpo(SUMS_P2, REF_P2, label_smoothing=0.5), "below 0.5"),
        (lambda: losses.cpo(np.zeros(6)), "last axis must hold two"),
        (lambda: losses.simpo(AVG_P2, gamma=-1.0), "gamma=-1.0 must be 0 or more"),
        (lambda: losses.bradley_terry(np.zeros(3)), "last axis must hold two"),
        (lambda: losses.bradley_terry(SCORES_P2, centre=-1.0), "centre=-1.0"),
        (lambda: losses.kto(REF_P2, REF_P2, True, 0.0, beta=-1.0), "beta=-1.0"),
        (lambda: losses.kto(REF_P2, REF_P2, True, 0.0, desirable_weight=-1.0), "must be 0 or more"),
    ],
)
def test_numbers_out_of_range_are_named(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call()
