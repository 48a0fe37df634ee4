"""Objectives and averages against closed forms in float64."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import stats

from fornax.config.errors import ConfigError
from fornax.diffusion import objectives
from fornax.diffusion.objectives import Objective
from fornax.diffusion.predictions import Point, target, to_data
from fornax.optim.averages import (
    average_with,
    power_decay,
    power_exponent,
    reconstruct,
    warmed_up,
)

ALPHA = np.array([0.999, 0.8, 0.3, 0.02])


def levels(path):
    sigma = {
        "flow": 1 - ALPHA,
        "cosine": np.sqrt(1 - ALPHA**2),
        "edm": np.array([0.01, 0.5, 3, 60]),
    }[path]
    alpha = np.ones(4) if path == "edm" else ALPHA
    return Point(*(jnp.asarray(v, jnp.float64) for v in (sigma, alpha, sigma)))


CASES = [
    ("flow", "flow"), ("flow", "data"), ("flow", "noise"),
    ("cosine", "v"), ("cosine", "noise"), ("cosine", "data"),
    ("edm", "edm"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "prediction"), CASES)
def test_targets_stand_for_the_data(path, prediction):
    random = np.random.default_rng(0)
    with jax.enable_x64(True):
        point = levels(path)
        data, noise = (jnp.asarray(random.normal(size=(4, 6))) for _ in range(2))
        objective = Objective(path=path, prediction=prediction)
        x = objective.noised(data, noise, point)
        wanted = target(prediction, data, noise, point)
        np.testing.assert_allclose(
            to_data(prediction, wanted, x, point), data, rtol=1e-9, atol=1e-9
        )
        losses = objective.losses(wanted + 1, data, noise, point)
        np.testing.assert_allclose(losses, objective.weights(point), rtol=1e-12)


@pytest.mark.parametrize("weight", ["min-snr", "sigmoid", "cosmap"])
def test_a_weight_is_one_loss_whatever_is_predicted(weight):
    """An error of the data, seen through each prediction, weighs the same; and as published."""
    error = 1e-3
    with jax.enable_x64(True):
        path = "flow" if weight == "cosmap" else "cosine"
        point = levels(path)
        a, s = (np.asarray(v) for v in point[1:])
        snr = (a / s) ** 2
        published = {  # on the data's squared error
            "min-snr": np.minimum(snr, 5),
            "sigmoid": snr / (1 + snr),  # on the noise: sigmoid(-log SNR), and the noise's is SNR
            "cosmap": 2 / (np.pi * (1 - 2 * s + 2 * s**2)) / s**2,
        }[weight]
        if weight == "sigmoid":
            published = snr / (1 + snr)
        data, noise = jnp.zeros((4, 3)), jnp.ones((4, 3))
        for prediction in ("noise", "data", "v") if path == "cosine" else ("noise", "data", "flow"):
            objective = Objective(path=path, prediction=prediction, weight=weight)
            x = objective.noised(data, noise, point)
            # The output whose data is off by `error`: solved from to_data, which is affine in it.
            at0 = to_data(prediction, jnp.zeros_like(x), x, point)
            at1 = to_data(prediction, jnp.ones_like(x), x, point)
            output = (data + error - at0) / (at1 - at0)
            found = objective.losses(output, data, noise, point)
            np.testing.assert_allclose(found, published * error**2, rtol=1e-6)


def test_edm_is_a_loss_of_one_on_its_output():
    with jax.enable_x64(True):
        point = levels("edm")
        objective = Objective(path="edm", prediction="edm", weight="edm")
        np.testing.assert_allclose(objective.weights(point), 1, rtol=1e-12)


U = (np.arange(20_000) + 0.5) / 20_000


@pytest.mark.parametrize(("mean", "deviation"), [(0.0, 1.0), (-0.5, 0.7)])
def test_logit_normal(mean, deviation):
    with jax.enable_x64(True):
        point = Objective(mean=mean, deviation=deviation).point(jnp.asarray(U))
    logits = np.log(np.asarray(point.sigma) / (1 - np.asarray(point.sigma)))
    np.testing.assert_allclose(logits, stats.norm.ppf(U) * deviation + mean, atol=1e-8)


def test_log_normal_levels_and_shifts():
    with jax.enable_x64(True):
        u = jnp.asarray(U)
        edm = Objective(path="edm", prediction="edm", mean=-1.2, deviation=1.2).point(u)
        np.testing.assert_allclose(
            edm.sigma, stats.lognorm.ppf(U, 1.2, scale=np.exp(-1.2)), rtol=1e-8
        )
        np.testing.assert_allclose(edm.t, np.log(edm.sigma) / 4)
        plain = Objective(density="uniform").point(u)
        moved = Objective(density="uniform", shift=3.0).point(u)
        np.testing.assert_allclose(
            moved.sigma / moved.alpha, 3 * plain.sigma / plain.alpha, rtol=1e-10
        )
        plain = Objective(path="cosine", prediction="v", density="uniform").point(u)
        moved = Objective(path="cosine", prediction="v", density="uniform", shift=3.0).point(u)
        np.testing.assert_allclose(plain.alpha, np.cos(np.pi / 2 * U), rtol=1e-10)
        np.testing.assert_allclose(
            moved.sigma / moved.alpha, 3 * plain.sigma / plain.alpha, rtol=1e-10
        )
        mode = Objective(density="mode", mode_scale=1.29).point(u)
        expected = 1 - U - 1.29 * (np.cos(np.pi / 2 * U) ** 2 - 1 + U)
        np.testing.assert_allclose(mode.sigma, expected, atol=1e-12)


WITHIN = (0.6, 0.95)


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_times_of_a_part_are_the_density_cut_off(shift):
    """A truncated normal before the shift; others by the times of all that lie in the part."""
    with jax.enable_x64(True):
        objective = Objective(mean=-0.3, deviation=0.8, shift=shift)
        found = objective.point(objective.within(jnp.asarray(U), WITHIN))
    edges = [y / (shift - (shift - 1) * y) for y in WITHIN]
    logits = stats.truncnorm.ppf(
        U, *((np.log(e / (1 - e)) + 0.3) / 0.8 for e in edges), loc=-0.3, scale=0.8
    )
    sigma = 1 / (1 + np.exp(-logits))
    np.testing.assert_allclose(found.sigma, shift * sigma / (1 + (shift - 1) * sigma), rtol=1e-7)


@pytest.mark.parametrize(
    "fields",
    [
        {"density": "uniform"},
        {"density": "mode", "shift": 3.0},
        {"path": "cosine", "prediction": "v", "shift": 2.0},
        {"path": "cosine", "prediction": "v", "density": "uniform"},
        {"path": "discrete", "prediction": "v", "density": "uniform", "chain": objectives.Chain()},
    ],
)
def test_times_of_a_part_are_as_likely_to_each_other_as_before(fields):
    with jax.enable_x64(True):
        objective, u = Objective(**fields), jnp.asarray(U)
        whole = np.asarray(objective.point(u).t) / 1000
        part = np.asarray(objective.point(objective.within(u, WITHIN)).t) / 1000
    assert part.min() >= WITHIN[0] - 1e-9
    assert part.max() <= WITHIN[1] + 1e-9
    kept = np.sort(whole[(whole >= WITHIN[0]) & (whole <= WITHIN[1])])
    at = np.linspace(0.01, 0.99, 50)
    np.testing.assert_allclose(np.quantile(part, at), np.quantile(kept, at), atol=1e-3)


def test_levels_without_a_greatest_have_no_parts():
    with pytest.raises(ConfigError, match="no greatest level of noise"):
        Objective(path="edm", prediction="edm").within(jnp.asarray(U), WITHIN)


ENDS = [
    (path, prediction, weight)
    for (path, prediction), weight in itertools.product(
        CASES, ["constant", "min-snr", "sigmoid", "cosmap", "edm"]
    )
    if (weight != "cosmap" or path == "flow") and (weight != "edm" or path == "edm")
]


@pytest.mark.parametrize(("path", "prediction", "weight"), ENDS)
def test_losses_and_gradients_are_finite_at_both_ends(path, prediction, weight):
    objective = Objective(path=path, prediction=prediction, weight=weight)
    ends = {"edm": ([1, 1], [1e-5, 1e4])}.get(path, ([1, 0], [0, 1]))
    point = Point(jnp.zeros(2), *(jnp.asarray(v, jnp.float32) for v in ends))
    data, noise = jnp.full((2, 3), 0.5), jnp.full((2, 3), -1.0)
    x = objective.noised(data, noise, point)
    value, slope = jax.value_and_grad(lambda w: objective.losses(w * x, data, noise, point).sum())(
        0.7
    )
    assert np.isfinite(value)
    assert np.isfinite(slope)


def test_noise_goes_with_the_example_and_the_step():
    ids = jnp.arange(6, dtype=jnp.int32) * 1000
    whole = objectives.example_noise(3, 17, ids, (2, 5))
    np.testing.assert_array_equal(
        objectives.example_noise(3, 17, ids[::-1][:2], (2, 5)), whole[::-1][:2]
    )
    assert (objectives.example_noise(3, 18, ids, (2, 5)) != whole).all()
    assert (objectives.example_noise(4, 17, ids, (2, 5)) != whole).all()
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spread = jax.device_put(ids, jax.sharding.NamedSharding(mesh, jax.P("data")))
    drawn = jax.jit(lambda ids: objectives.example_noise(3, 17, ids, (2, 5)))(spread)
    np.testing.assert_array_equal(drawn, whole)
    many = objectives.example_noise(0, 0, jnp.arange(2000), (10,))
    assert stats.kstest(np.asarray(many).ravel(), "norm").pvalue > 1e-3
    uniform = objectives.example_uniform(0, 0, jnp.arange(2000))
    assert stats.kstest(np.asarray(uniform), "uniform").pvalue > 1e-3
    strata = objectives.stratified(uniform, jnp.arange(2000), 2000)
    middles = np.arange(2000) + 0.5
    np.testing.assert_allclose(np.asarray(strata, np.float64) * 2000, middles, rtol=0, atol=0.501)


def run(transformation, values):
    """States of a transformation after each of a row of parameter values."""
    params = {"w": jnp.zeros(())}
    state, states = transformation.init(params), []
    for value in values:
        updates = {"w": jnp.asarray(value) - params["w"]}
        updates, state = transformation.update(updates, state, params)
        params = optax.apply_updates(params, updates)
        states.append(state)
    return states


def test_averages_have_their_profiles():
    with jax.enable_x64(True):
        values = np.random.default_rng(0).normal(size=60)
        states = run(average_with(power_decay(6.0), warmed_up(0.99)), values)
        t = np.arange(1, 61)
        # The recursion's own weights: prod of later decays, times what the step adds.
        decay = (1 - 1 / t) ** 7
        weights = (1 - decay) * np.append(np.cumprod(decay[:0:-1])[::-1], 1)
        assert weights.sum() == pytest.approx(1)
        assert float(states[-1].averages[0]["w"]) == pytest.approx(weights @ values, rel=1e-4)
        profile = t**7.0 - (t - 1) ** 7.0  # the integral of t^6 over each step
        np.testing.assert_allclose(weights, profile / profile.sum(), rtol=1e-9)
        warm = 0.0
        for n, value in enumerate(values):
            d = min(0.99, (1 + n) / (10 + n))
            warm = d * warm + (1 - d) * value
        assert float(states[-1].averages[1]["w"]) == pytest.approx(warm, rel=1e-4)


@pytest.mark.parametrize("width", [0.05, 0.1, 0.25])
def test_exponents_have_their_width(width):
    exponent = power_exponent(width)
    # t^g on (0, 1) is Beta(g + 1, 1).
    assert stats.beta(exponent + 1, 1).std() == pytest.approx(width)


def test_any_length_is_reconstructed_afterwards():
    """Snapshots of two lengths give a third as if it had been tracked."""
    steps = 4000
    t = np.arange(1, steps + 1)
    values = np.sin(t / 700) + t / steps
    kept = (power_exponent(0.05), power_exponent(0.1))
    wanted = power_exponent(0.075)

    def averages(exponent):
        found, average = [], 0.0
        for n, value in enumerate(values, 1):
            share = (1 - 1 / n) ** (exponent + 1)
            average = share * average + (1 - share) * value
            found.append(average)
        return np.array(found)

    tracked = {g: averages(g) for g in (*kept, wanted)}
    at = [n for n in range(500, steps + 1, 500) for _ in kept]
    lengths = list(kept) * (len(at) // 2)
    snapshots = [{"w": np.float32(tracked[g][n - 1])} for g, n in zip(lengths, at, strict=True)]
    found = reconstruct(snapshots, at, lengths, steps, wanted)
    assert found["w"] == pytest.approx(tracked[wanted][-1], abs=2e-3)
    assert abs(tracked[kept[0]][-1] - tracked[wanted][-1]) > 2e-2


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda: Objective(shift=0.0), "shift=0"),
        (lambda: Objective(prediction="edm"), "path='edm'"),
        (lambda: Objective(weight="edm"), "path='edm'"),
        (lambda: Objective(path="edm", prediction="edm", density="uniform"), "density"),
        (lambda: Objective(path="cosine", prediction="v", weight="cosmap"), "cosmap"),
        (lambda: power_exponent(0.4), "0.28"),
        (lambda: power_exponent(0.0), "0.28"),
        (lambda: reconstruct([], [], [], 1, 1.0), "at least one"),
    ],
)
def test_bad_values_are_refused(wrong, says):
    with pytest.raises(ConfigError, match=says):
        wrong()
