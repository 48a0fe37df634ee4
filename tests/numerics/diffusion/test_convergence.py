"""Orders of convergence in float64, against the closed form of the probability flow.

Of Gaussian data N(m, s^2) the exact network is linear, and a state keeps its quantile:
x = alpha m + c sqrt(alpha^2 s^2 + sigma^2) along the whole way.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.integrate import quad

from fornax.diffusion import predictions, samplers
from fornax.diffusion.sampling import sample
from fornax.diffusion.schedules import Schedule

MEAN, WIDTH = 0.7, 0.6


def schedule(path, steps, low=-4.0, high=3.0):
    """Even steps of log-SNR."""
    ratio = np.exp(-np.linspace(low, high, steps + 1))
    alpha = {"vp": (1 + ratio**2) ** -0.5, "flow": 1 / (1 + ratio), "ve": np.ones_like(ratio)}[path]
    return Schedule(path=path, t=1000 * ratio, alpha=alpha, sigma=ratio * alpha)


def claimed(x, point):
    variance = point.alpha**2 * WIDTH**2 + point.sigma**2
    return MEAN + point.alpha * WIDTH**2 / variance * (x - point.alpha * MEAN)


def network(kind):
    def run(x, point):
        data = claimed(x, point)
        noise = (x - point.alpha * data) / point.sigma
        return predictions.target(kind, data, noise, point)

    return run


def error(path, kind, make, steps):
    with jax.enable_x64(True):
        levels = schedule(path, steps)
        width = np.sqrt(levels.alpha**2 * WIDTH**2 + levels.sigma**2)
        quantile = jnp.linspace(-1.5, 1.5, 5)
        x = levels.alpha[0] * MEAN + quantile * width[0]
        found = sample(network(kind), x, make(levels), prediction=kind)
        assert found.dtype == jnp.float64
        return float(jnp.abs(found - (levels.alpha[-1] * MEAN + quantile * width[-1])).max())


@pytest.mark.parametrize(
    ("path", "kind"), [("vp", "v"), ("vp", "noise"), ("flow", "flow"), ("ve", "edm")]
)
@pytest.mark.parametrize(
    ("name", "order"),
    [
        ("euler", 1),
        ("heun", 2),
        ("dpm++2m", 2),
        ("dpm++3m", 2),  # as published: half of the second difference's weight is missing
        ("unipc", 3),
    ],
)
def test_order(path, kind, name, order):
    make = samplers.SAMPLERS[name]
    coarse, fine = (error(path, kind, make, steps) for steps in (40, 80))
    assert np.log2(coarse / fine) > order - 0.15
    assert fine < {1: 5e-2, 2: 2e-3, 3: 2e-4}[order]


@pytest.mark.parametrize("order", [1, 2])
def test_sde_step_is_exact_for_the_claims_that_it_assumes(order):
    """Claims are polynomials of log-SNR, of a degree below the order: the mean is an integral."""
    coefficients = np.array([0.3, -0.8, 0.2])[:order]
    levels = schedule("vp", 16)
    lam = np.log(levels.alpha / levels.sigma)
    table = samplers.dpmpp(levels, order, sde=True, solver="heun")
    step = 7
    h = lam[step + 1] - lam[step]
    claim = np.polynomial.Polynomial(coefficients)
    newest = claim(lam[step - np.arange(order)])
    x = 1.3
    found = table.update[step, 0] * x + table.update[step, 1:] @ newest
    # dx = ... with weight 2 exp(-2 (lam' - s)) on the claim at s.
    integral = quad(
        lambda s: 2 * np.exp(-2 * (lam[step + 1] - s)) * claim(s), *lam[step : step + 2]
    )
    fade = levels.sigma[step + 1] / levels.sigma[step] * np.exp(-h)
    assert found == pytest.approx(fade * x + levels.alpha[step + 1] * integral[0], rel=1e-12)
    assert table.noise[step] == pytest.approx(levels.sigma[step + 1] * np.sqrt(1 - np.exp(-2 * h)))


def test_third_order_sde_is_the_deterministic_one_at_twice_the_step():
    """The published formulas differ by h -> 2h alone; diffusers' SDE has a sign wrong."""
    levels = schedule("vp", 20)
    h = np.diff(np.log(levels.alpha / levels.sigma))[0]
    # The same claims' weights from k-diffusion's DPM-Solver++(3M) SDE, at eta = 1.
    phi_2 = np.expm1(-2 * h) / (2 * h) + 1
    phi_3 = phi_2 / (2 * h) - 0.5
    slope, bend = np.array([1.5, -2, 0.5]), np.array([0.5, -1, 0.5])
    weights = np.array([-np.expm1(-2 * h), 0, 0]) + phi_2 * slope - phi_3 * bend
    table = samplers.dpmpp(levels, 3, sde=True)
    np.testing.assert_allclose(table.update[9, 1:], levels.alpha[10] * weights, rtol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "steps"), [("euler-ancestral", 400), ("dpm++2m-sde", 50), ("dpm++3m-sde", 50)]
)
def test_noise_keeps_the_distribution(name, steps):
    """Samplers with fresh noise draw N(m, s^2); Euler's, of order 1, needs more steps for it."""
    levels = schedule("vp", steps, -5, 5)
    count = 20_000
    x = jax.random.normal(jax.random.key(1), (1, count)) * levels.sigma[0].astype("f")
    table = samplers.SAMPLERS[name](levels)
    found = sample(network("v"), x, table, jax.random.key(2), prediction="v") / levels.alpha[-1]
    spread = np.sqrt(WIDTH**2 + (levels.sigma[-1] / levels.alpha[-1]) ** 2)
    assert float(found.mean()) == pytest.approx(MEAN, abs=4 * spread / count**0.5)
    assert float(found.std()) == pytest.approx(spread, rel=0.03)
