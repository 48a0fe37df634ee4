"""Losses of distillation and preference beside float64 formulas written with NumPy."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from fornax.config.errors import ConfigError
from fornax.diffusion import SAMPLERS, Point, flow, sample
from fornax.diffusion.distill import (
    consistency_losses,
    few_step_sample,
    matching_losses,
    solver_levels,
)
from fornax.diffusion.preference import diffusion_dpo, draw, flow_grpo, rows_of, step_kl, step_means
from fornax.diffusion.samplers import ddim, heun, lcm
from fornax.diffusion.schedules import Discrete, scaled_linear_betas

RANDOM = np.random.default_rng(0)
W = RANDOM.normal(size=(6, 6)) * 0.3


@pytest.fixture(autouse=True)
def wide():
    with jax.enable_x64(True):
        yield


def linear(scale, w=W):
    """Claims that are linear in x and depend on the level."""
    return lambda x, p: (scale + p.sigma[..., None]) * (x @ jnp.asarray(w))


@pytest.mark.parametrize(
    "schedule", [flow(8, shift=3.0), Discrete(scaled_linear_betas()).schedule(8)]
)
@pytest.mark.parametrize("huber", [0.0, 0.01])
def test_consistency_loss_is_the_formula_on_either_path(schedule, huber):
    data, noise = RANDOM.normal(size=(2, 16, 6))
    uniform = RANDOM.uniform(size=16)
    uniform[:2] = 0.0, 1 - 2**-30  # the first and the last step, which ends without noise
    here, there = solver_levels(schedule, jnp.asarray(uniform))
    loss = jax.jit(partial(consistency_losses, linear(0.5), linear(0.9), huber=huber))
    found = np.asarray(loss(data, noise, (here, there)))
    for b in range(16):
        n = min(int(uniform[b] * 8), 7)
        a0, s0, a1, s1 = (
            schedule.alpha[n], schedule.sigma[n], schedule.alpha[n + 1], schedule.sigma[n + 1]
        )  # fmt: skip
        x = a0 * data[b] + s0 * noise[b]
        teacher = (0.9 + s0) * (x @ W)
        after = a1 * teacher + s1 * (x - a0 * teacher) / s0
        kept = (1 - (a1 / (a1 + s1)) ** 4) / (1 - (a0 / (a0 + s0)) ** 4)
        target = kept * (0.5 + s1) * (after @ W) + (1 - kept) * teacher
        squared = np.mean(((0.5 + s0) * (x @ W) - target) ** 2)
        assert found[b] == pytest.approx(np.sqrt(squared + huber**2) - huber, rel=1e-10)


def test_consistency_target_has_no_gradient_and_an_error_of_zero_a_finite_one():
    data, noise = map(jnp.asarray, RANDOM.normal(size=(2, 4, 6)))
    levels = solver_levels(flow(4), jnp.asarray([0.0, 0.3, 0.6, 0.99]))

    @jax.jit
    def total(scale, target_scale):
        calls = iter((target_scale, scale))  # the target is asked for first
        student = lambda x, p: linear(next(calls))(x, p)  # noqa: E731
        return consistency_losses(student, linear(0.9), data, noise, levels).sum()

    mine, target = jax.jit(jax.grad(total, (0, 1)))(0.5, 0.5)
    step = 1e-6
    finite = (total(0.5 + step, 0.5) - total(0.5 - step, 0.5)) / (2 * step)
    assert float(mine) == pytest.approx(float(finite), rel=1e-6)
    assert target == 0

    def still(scale):
        constant = lambda x, p: jnp.zeros_like(x) * scale  # noqa: E731
        return consistency_losses(constant, constant, data, noise, levels, huber=0.0).sum()

    assert np.isfinite(jax.jit(jax.grad(still))(1.0))


def test_a_perfect_consistency_model_has_no_loss():
    # For normal data the probability flow is linear and its end known in closed form.
    deviation = 0.5
    schedule = flow(4000)

    def total(p):
        return jnp.sqrt((p.alpha * deviation) ** 2 + p.sigma**2)[..., None]

    teacher = lambda x, p: (p.alpha * deviation**2)[..., None] * x / total(p) ** 2  # noqa: E731
    student = lambda x, p: deviation * x / total(p)  # noqa: E731
    data, noise = map(jnp.asarray, RANDOM.normal(size=(2, 64, 6)))
    levels = solver_levels(schedule, jnp.asarray(RANDOM.uniform(size=64)))
    loss = jax.jit(partial(consistency_losses, student, teacher, huber=0.0))
    found = loss(deviation * data, noise, levels)
    assert found.max() < 2e-3  # the step's own error, of order 1 / 4000
    # The same error over a hundred times the step grows with it.
    coarse = solver_levels(flow(40), jnp.asarray(RANDOM.uniform(size=64)))
    assert loss(deviation * data, noise, coarse).mean() > 20 * found.mean()


def test_matching_gradient_is_the_difference_of_claims():
    drawn, noise = map(jnp.asarray, RANDOM.normal(size=(2, 5, 6)))
    sigma = jnp.asarray([0.1, 0.3, 0.5, 0.7, 0.9])
    point = Point(1000 * sigma, 1 - sigma, sigma)

    def total(drawn):
        return matching_losses(drawn, linear(0.9), linear(0.2), noise, point).sum()

    found = jax.jit(jax.grad(total))(drawn)
    x = (1 - sigma)[:, None] * drawn + sigma[:, None] * noise
    real, fake = (np.asarray(scale + sigma)[:, None] * (np.asarray(x) @ W) for scale in (0.9, 0.2))
    scale = np.abs(np.asarray(drawn) - real).mean(1, keepdims=True)
    np.testing.assert_allclose(found, (fake - real) / scale / 6, rtol=1e-10)


def test_a_few_steps_are_those_that_the_sampler_makes():
    table, key = lcm(flow(4)), jax.random.key(3)
    noise = jnp.asarray(RANDOM.normal(size=(4, 6)))
    student = linear(0.5)
    x, point = jax.jit(lambda n: few_step_sample(student, n, table, key, jnp.arange(4)))(noise)
    np.testing.assert_allclose(point.sigma, [1, 0.75, 0.5, 0.25])
    np.testing.assert_array_equal(x[0], noise[0])
    # The row before the last step ends where the sampler with the same key does.
    plain = sample(linear_of(0.5), noise, table, key, prediction="data")
    np.testing.assert_allclose(student(x, point)[3], plain[3], atol=1e-6)
    with pytest.raises(ConfigError, match=r"samplers\.lcm"):
        few_step_sample(student, noise, ddim(flow(4)), key, jnp.arange(4))


def test_dpo_is_the_papers_formula():
    errors, reference = RANDOM.uniform(size=(2, 7, 2))
    found, metrics = diffusion_dpo(jnp.asarray(errors), jnp.asarray(reference), beta=200.0)
    inside = (errors - reference)[:, 0] - (errors - reference)[:, 1]
    np.testing.assert_allclose(found, np.log1p(np.exp(100.0 * inside)), rtol=1e-10)
    np.testing.assert_array_equal(metrics["accuracy"], inside < 0)
    step = 1e-6

    def loss(e):
        return diffusion_dpo(e, jnp.asarray(reference), beta=20.0)[0].sum()

    gradient = jax.jit(jax.grad(loss))(errors)
    nudge = np.zeros_like(errors)
    nudge[3, 1] = step
    finite = (loss(errors + nudge) - loss(errors - nudge)) / (2 * step)
    assert float(gradient[3, 1]) == pytest.approx(float(finite), rel=1e-6)


def test_log_probabilities_are_those_of_the_normal_that_was_drawn_from():
    table, key = ddim(flow(5), 0.7), jax.random.key(1)
    noise = jnp.asarray(RANDOM.normal(size=(3, 6)))
    path = draw(linear(0.4), noise, table, key, prediction="data")
    assert path.x_MBX.shape == (6, 3, 6)
    plain = sample(linear_of(0.4), noise, table, key, prediction="data")
    np.testing.assert_allclose(path.x_MBX[-1], plain, rtol=1e-12)
    schedule = flow(5)
    for m in range(4):
        a0, s0, a1, s1 = (
            schedule.alpha[m], schedule.sigma[m], schedule.alpha[m + 1], schedule.sigma[m + 1]
        )  # fmt: skip
        x = np.asarray(path.x_MBX[m])
        claim = (0.4 + s0) * (x @ W)
        deviation = 0.7 * s1 * np.sqrt(1 - (a0 * s1 / (a1 * s0)) ** 2)
        mean = a1 * claim + np.sqrt(s1**2 - deviation**2) * (x - a0 * claim) / s0
        wanted = stats.norm(mean, deviation).logpdf(path.x_MBX[m + 1]).mean(1)
        np.testing.assert_allclose(path.logps_MB[m], wanted, rtol=1e-9)
    np.testing.assert_array_equal(path.logps_MB[4], 0)  # the last step adds no noise


def linear_of(scale):
    return lambda x, p: (scale + p.sigma) * (x @ jnp.asarray(W))


def test_kl_of_a_step_is_that_of_two_normals():
    table = ddim(flow(4), 1.0)
    rows = rows_of(table, jnp.float64)
    row = jax.tree.map(lambda v: v[1:2], rows)
    x = jnp.asarray(RANDOM.normal(size=(1, 6)))
    mine, other = (step_means(linear(s), x, row, prediction="data") for s in (0.4, 0.6))
    # Of equal deviations: the integral of p log(p / q), by quadrature, element by element.
    deviation = float(table.noise[1])
    grid = np.linspace(-12, 12, 20001)

    def kl(p, q):
        density = stats.norm(p, deviation)
        inside = density.pdf(grid) * (density.logpdf(grid) - stats.norm(q, deviation).logpdf(grid))
        return np.trapezoid(inside, grid)

    wanted = np.mean([kl(float(p), float(q)) for p, q in zip(mine[0], other[0], strict=True)])
    assert step_kl(mine, other, row.noise)[0] == pytest.approx(wanted, rel=1e-6)


def test_flow_grpo_is_the_surrogate_and_the_divergence_of_all_steps():
    schedule, kl = flow(4), 0.3
    table, advantages = ddim(schedule, 0.7), jnp.asarray([1.5, -0.5, -1.0])
    noise = jnp.asarray(RANDOM.normal(size=(3, 6)))
    path = draw(linear(0.4), noise, table, jax.random.key(1), prediction="data")
    states, old = path.x_MBX[:-1], path.logps_MB[:-1].T  # the last step is not random

    def run(scale, reference, kl):
        found, metrics = flow_grpo(
            linear(scale), reference, states, old, advantages, table,
            prediction="data", kl=kl,
        )  # fmt: skip
        return found.sum(), (found, metrics)

    def wanted(scale, divergences):
        losses = np.zeros(3)
        for m in range(4):
            a0, s0, a1, s1 = (
                schedule.alpha[m], schedule.sigma[m], schedule.alpha[m + 1], schedule.sigma[m + 1]
            )  # fmt: skip
            x, deviation = np.asarray(states[m]), table.noise[m] or table.noise[m - 1]
            kept = np.sqrt(s1**2 - table.noise[m] ** 2)
            mine, other = (
                a1 * (s + s0) * (x @ W) + kept * (x - a0 * (s + s0) * (x @ W)) / s0
                for s in (scale, 0.6)
            )
            part = kl * ((mine - other) ** 2 / (2 * deviation**2)).mean(1) * divergences
            if m < 3:
                logps = stats.norm(mine, deviation).logpdf(states[m + 1]).mean(1)
                ratio = np.exp(logps - np.asarray(old)[:, m])
                surrogate = np.minimum(
                    ratio * np.asarray(advantages), np.clip(ratio, 0.8, 1.2) * advantages
                )
                part = (part - surrogate) / 3
            losses += part
        return losses

    gradient = jax.jit(jax.value_and_grad(run, has_aux=True), static_argnums=(1, 2))
    (_, (found, metrics)), slope = gradient(0.42, linear(0.6), kl)
    np.testing.assert_allclose(found, wanted(0.42, 1), rtol=1e-9)
    np.testing.assert_allclose(metrics["kl"], (wanted(0.42, 1) - wanted(0.42, 0)) / kl, rtol=1e-9)
    step = 1e-6
    finite = (wanted(0.42 + step, 1) - wanted(0.42 - step, 1)).sum() / (2 * step)
    assert float(slope) == pytest.approx(float(finite), rel=1e-6)
    # What was drawn is drawn by the network itself: ratios of 1.
    (_, (found, metrics)), _ = gradient(0.4, None, 0.0)
    np.testing.assert_allclose(metrics["ratio"], 1, rtol=1e-12)
    np.testing.assert_allclose(found, -advantages, rtol=1e-12)
    with pytest.raises(ConfigError, match="give one, or kl 0"):
        run(0.4, None, kl)


def test_stochastic_steps_keep_the_flows_marginals():
    # Normal data of deviation 0.5: at any eta the end has that deviation, up to the step's error.
    deviation, schedule = 0.5, flow(200)

    def network(x, p):
        return p.alpha * deviation**2 * x / ((p.alpha * deviation) ** 2 + p.sigma**2)

    noise = jax.random.normal(jax.random.key(0), (20000, 1))
    for eta in (0.5, 1.0):
        table = ddim(schedule, eta)
        run = jax.jit(lambda n, t=table: draw(network, n, t, jax.random.key(1), prediction="data"))
        assert float(jnp.std(run(noise).x_MBX[-1])) == pytest.approx(deviation, rel=0.03)


@pytest.mark.parametrize(
    "table", [ddim(flow(4)), heun(flow(4)), SAMPLERS["dpm++2m-sde"](flow(4)), ddim(flow(1), 1.0)]
)
def test_a_sampler_without_densities_is_refused(table):
    with pytest.raises(ConfigError, match="log-probability"):
        draw(linear_of(0.4), jnp.zeros((1, 6)), table, jax.random.key(0), prediction="data")
