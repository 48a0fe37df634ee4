"""Samplers and schedules beside diffusers' schedulers, on a mixture of two Gaussians.

Both sides see the same start, the same exact network and the same fresh noise. diffusers' sigmas
are float32, so both agree to a few of its roundings.
"""

from collections.abc import Callable
from typing import Any

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from fornax.diffusion import predictions, samplers, schedules
from fornax.diffusion.sampling import row_noise, sample
from fornax.diffusion.schedules import Discrete, Schedule

# The oracle hands its tensors to NumPy in an old way.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
SHAPE = (3, 5)
KEY = jax.random.key(7)
BETAS = schedules.scaled_linear_betas()
CHAIN = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}
MEANS, WIDTHS = np.array([-0.8, 0.9]), np.array([0.3, 0.2])


def claims(x: Any, alpha: Any, sigma: Any, np: Any) -> Any:
    """The exact mean of the data given x: E[data | x] under the mixture, for any array library."""
    variance = alpha**2 * WIDTHS**2 + sigma**2
    apart = x[..., None] - alpha * MEANS
    logits = -0.5 * apart**2 / variance - 0.5 * np.log(variance)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights = weights / weights.sum(-1, keepdims=True)
    return (weights * (MEANS + alpha * WIDTHS**2 / variance * apart)).sum(-1)


def network(kind: predictions.Prediction) -> Callable[[jax.Array, predictions.Point], jax.Array]:
    def run(x: jax.Array, point: predictions.Point) -> jax.Array:
        data = claims(x, point.alpha, point.sigma, jnp)
        noise = (x - point.alpha * data) / point.sigma
        return predictions.target(kind, data, noise, point)

    return run


def theirs(
    scheduler: Any,
    start: np.ndarray,
    kind: predictions.Prediction,
    schedule: Schedule,
    monkeypatch: pytest.MonkeyPatch,
    levels: np.ndarray | None = None,
    **arguments: Any,
) -> np.ndarray:
    """diffusers' loop; `start` and the result are in its own coordinates."""
    step = 0
    module = __import__(type(scheduler).__module__, fromlist=["randn_tensor"])
    if hasattr(module, "randn_tensor"):
        monkeypatch.setattr(
            module,
            "randn_tensor",
            lambda shape, **_: torch.from_numpy(np.array(row_noise(KEY, step, tuple(shape)))),
        )
    at = np.stack([schedule.alpha, schedule.sigma], 1) if levels is None else levels
    x = torch.from_numpy(np.array(start, np.float32))
    for t in scheduler.timesteps:
        scale = getattr(scheduler, "scale_model_input", lambda x, t: x)  # flows have none
        seen = scale(x, t).numpy().astype(np.float64)
        alpha, sigma = at[step]
        if kind == "edm":  # the scheduler has scaled the input by c_in
            seen = seen * np.sqrt(sigma**2 + 0.25)
        data = claims(seen, alpha, sigma, np)
        noise = (seen - alpha * data) / sigma
        point = predictions.Point(jnp.zeros(()), jnp.asarray(alpha), jnp.asarray(sigma))
        with jax.enable_x64(True):
            out = np.array(predictions.target(kind, jnp.asarray(data), jnp.asarray(noise), point))
        x = scheduler.step(torch.from_numpy(out).float(), t, x, **arguments).prev_sample
        step += 1
    return x.numpy()


def ours(table: samplers.Table, start: np.ndarray, kind: predictions.Prediction) -> np.ndarray:
    run = jax.jit(lambda x: sample(network(kind), x, table, KEY, prediction=kind))
    return np.asarray(run(jnp.asarray(start, jnp.float32)))


def noise(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=SHAPE)


def close(found: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(found, expected, atol=5e-5, rtol=5e-5)


@pytest.mark.parametrize("spacing", ["leading", "trailing"])
@pytest.mark.parametrize("eta", [0.0, 0.7])
@pytest.mark.parametrize("kind", ["noise", "v", "data"])
def test_ddim(spacing, eta, kind, monkeypatch):
    names = {"noise": "epsilon", "v": "v_prediction", "data": "sample"}
    scheduler = diffusers.DDIMScheduler(
        **CHAIN, timestep_spacing=spacing, clip_sample=False, prediction_type=names[kind]
    )
    scheduler.set_timesteps(20)
    schedule = Discrete(BETAS).schedule(20, spacing)
    np.testing.assert_array_equal(schedule.t[:-1], scheduler.timesteps.numpy())
    start = noise()
    expected = theirs(scheduler, start, kind, schedule, monkeypatch, eta=eta)
    close(ours(samplers.ddim(schedule, eta), start, kind), expected)


def test_ddim_to_the_smallest_noise(monkeypatch):
    """Whose last step begins there, and changes nothing."""
    scheduler = diffusers.DDIMScheduler(
        **CHAIN, timestep_spacing="leading", clip_sample=False, set_alpha_to_one=False
    )
    scheduler.set_timesteps(10)
    schedule = Discrete(BETAS).schedule(10, "leading", last="smallest")
    np.testing.assert_array_equal(schedule.t, scheduler.timesteps.numpy())
    start = noise()
    expected = theirs(scheduler, start, "noise", schedule, monkeypatch)
    close(ours(samplers.ddim(schedule), start, "noise"), expected)


def test_ddim_from_pure_noise(monkeypatch):
    scheduler = diffusers.DDIMScheduler(
        **CHAIN,
        rescale_betas_zero_snr=True,
        timestep_spacing="trailing",
        clip_sample=False,
        prediction_type="v_prediction",
    )
    scheduler.set_timesteps(10)
    chain = Discrete(schedules.zero_terminal_snr(BETAS))
    bar = scheduler.alphas_cumprod.numpy()
    np.testing.assert_allclose(chain.cumulative, bar, rtol=2e-4, atol=1e-7)
    schedule = chain.schedule(10, "trailing")
    assert schedule.alpha[0] == 0
    start = noise()
    expected = theirs(scheduler, start, "v", schedule, monkeypatch)
    np.testing.assert_allclose(ours(samplers.ddim(schedule), start, "v"), expected, atol=2e-4)


@pytest.mark.parametrize("variance", ["small", "large"])
@pytest.mark.parametrize("steps", [25, 1000])
def test_ddpm(variance, steps, monkeypatch):
    scheduler = diffusers.DDPMScheduler(
        **CHAIN, variance_type=f"fixed_{variance}", clip_sample=False, timestep_spacing="leading"
    )
    scheduler.set_timesteps(steps)
    schedule = Discrete(BETAS).schedule(steps, "leading")
    start = noise()
    expected = theirs(scheduler, start, "noise", schedule, monkeypatch)
    found = ours(samplers.ddpm(schedule, variance), start, "noise")
    np.testing.assert_allclose(found, expected, atol=5e-5 if steps == 25 else 5e-4)


K_DIFFUSION = {
    "euler": diffusers.EulerDiscreteScheduler,
    "euler-ancestral": diffusers.EulerAncestralDiscreteScheduler,
    "heun": diffusers.HeunDiscreteScheduler,
}


@pytest.mark.parametrize("name", K_DIFFUSION)
@pytest.mark.parametrize("spacing", ["leading", "trailing"])
def test_k_diffusion(name, spacing, monkeypatch):
    scheduler = K_DIFFUSION[name](**CHAIN, timestep_spacing=spacing)
    scheduler.set_timesteps(12)
    schedule = Discrete(BETAS).schedule(12, spacing)
    table = samplers.SAMPLERS[name](schedule)
    levels = table.points[:-1, 1:]
    np.testing.assert_allclose(
        scheduler.sigmas.numpy(), np.append(levels[:, 1] / levels[:, 0], 0), rtol=5e-5
    )
    start = noise() * schedule.sigma[0]
    expected = theirs(scheduler, start / schedule.alpha[0], "noise", schedule, monkeypatch, levels)
    close(ours(table, start, "noise"), expected)


@pytest.mark.parametrize("spacing", ["karras", "exponential", "beta"])
def test_spacings(spacing):
    scheduler = diffusers.EulerDiscreteScheduler(**CHAIN, **{f"use_{spacing}_sigmas": True})
    scheduler.set_timesteps(9)
    schedule = Discrete(BETAS).schedule(9, spacing)
    np.testing.assert_allclose(scheduler.sigmas.numpy(), schedule.sigma / schedule.alpha, rtol=5e-5)
    np.testing.assert_allclose(scheduler.timesteps.numpy(), schedule.t[:-1], atol=5e-3)


@pytest.mark.parametrize("curve", ["linear", "scaled_linear", "squaredcos_cap_v2"])
def test_chains(curve):
    scheduler = diffusers.DDPMScheduler(beta_schedule=curve, beta_start=1e-3, beta_end=0.015)
    make = {
        "linear": lambda: schedules.linear_betas(1e-3, 0.015),
        "scaled_linear": lambda: schedules.scaled_linear_betas(1e-3, 0.015),
        "squaredcos_cap_v2": schedules.cosine_betas,
    }
    found = Discrete(make[curve]()).cumulative
    # The oracle multiplies a thousand factors in float32.
    np.testing.assert_allclose(found, scheduler.alphas_cumprod.numpy(), rtol=2e-4, atol=1e-9)


@pytest.mark.parametrize("steps", [8, 20])
@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("solver", ["midpoint", "heun"])
@pytest.mark.parametrize("sde", [False, True])
@pytest.mark.parametrize("last", ["zero", "smallest"])
def test_dpm_solver(steps, order, solver, sde, last, monkeypatch):
    if sde and order == 3:
        pytest.skip("the oracle's third-order SDE has a wrong sign: tests/numerics/diffusion")
    scheduler = diffusers.DPMSolverMultistepScheduler(
        **CHAIN,
        algorithm_type="sde-dpmsolver++" if sde else "dpmsolver++",
        solver_order=order,
        solver_type=solver,
        use_karras_sigmas=True,
        final_sigmas_type={"zero": "zero", "smallest": "sigma_min"}[last],
    )
    scheduler.set_timesteps(steps)
    if last == "smallest":  # with Karras' sigmas the oracle's last two are equal
        scheduler.sigmas[-1] *= 0.8
    schedule = Discrete(BETAS).schedule(steps, "karras")
    if last == "smallest":
        ratio = scheduler.sigmas[-1].item()
        schedule.alpha[-1] = (1 + ratio**2) ** -0.5
        schedule.sigma[-1] = ratio * schedule.alpha[-1]
    start = noise()
    expected = theirs(scheduler, start, "noise", schedule, monkeypatch)
    close(ours(samplers.dpmpp(schedule, order, sde=sde, solver=solver), start, "noise"), expected)


@pytest.mark.parametrize("steps", [1, 2, 3, 12])
@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("solver", ["bh1", "bh2"])
@pytest.mark.parametrize("path", ["vp", "flow"])
def test_unipc(steps, order, solver, path, monkeypatch):
    flow = path == "flow"
    kind = "flow" if flow else "noise"
    options = {"use_flow_sigmas": True, "flow_shift": 3.0} if flow else {"use_karras_sigmas": True}
    scheduler = diffusers.UniPCMultistepScheduler(
        **CHAIN,
        **options,
        solver_order=order,
        solver_type=solver,
        prediction_type="flow_prediction" if flow else "epsilon",
    )
    scheduler.set_timesteps(steps)
    if flow:
        scheduler.sigmas[0] = min(scheduler.sigmas[0], 1 - 1e-6)
    if solver == "bh1":  # which is NaN in the oracle where the run ends without noise
        scheduler.sigmas[-1] = 0.5 * scheduler.sigmas[-2]
    sigma = scheduler.sigmas.double().numpy()
    alpha = 1 - sigma if flow else (1 + sigma**2) ** -0.5
    sigma = sigma if flow else sigma * alpha
    schedule = Schedule(path=path, t=1000 * sigma, alpha=alpha, sigma=sigma)
    start = noise()
    expected = theirs(scheduler, start, kind, schedule, monkeypatch)
    close(ours(samplers.unipc(schedule, order, solver), start, kind), expected)


@pytest.mark.parametrize("options", [{}, {"shift": 3.0}, {"mu": 1.15}, {"terminal": 0.1}])
@pytest.mark.parametrize("name", ["euler", "heun"])
def test_flow(options, name, monkeypatch):
    steps = 7
    shift = np.exp(options["mu"]) if "mu" in options else options.get("shift", 1.0)
    schedule = schedules.flow(steps, shift=shift, terminal=options.get("terminal"))
    start = noise()
    if name == "euler":
        scheduler = diffusers.FlowMatchEulerDiscreteScheduler(
            shift=options.get("shift", 1.0),
            use_dynamic_shifting="mu" in options,
            shift_terminal=options.get("terminal"),
        )
        scheduler.set_timesteps(sigmas=np.linspace(1, 1 / steps, steps), mu=options.get("mu"))
        np.testing.assert_allclose(scheduler.sigmas.numpy(), schedule.sigma, atol=1e-6)
        np.testing.assert_allclose(scheduler.timesteps.numpy(), schedule.t[:-1], rtol=1e-6)
    else:
        scheduler = diffusers.FlowMatchHeunDiscreteScheduler()
        scheduler.set_timesteps(steps)  # and then the same sigmas: it takes none
        sigma = torch.from_numpy(schedule.sigma).float()
        scheduler.sigmas = torch.cat([sigma[:1], sigma[1:-1].repeat_interleave(2), sigma[-1:]])
        scheduler.timesteps = 1000 * scheduler.sigmas[:-1]
        scheduler.set_begin_index(0)
    table = samplers.SAMPLERS[name](schedule)
    expected = theirs(scheduler, start, "flow", schedule, monkeypatch, table.points[:-1, 1:])
    close(ours(table, start, "flow"), expected)


@pytest.mark.parametrize("spacing", ["karras", "exponential"])
def test_edm(spacing, monkeypatch):
    schedule = schedules.edm(9, spacing=spacing)
    start = noise() * 80
    for scheduler, table in (
        (diffusers.EDMEulerScheduler, samplers.euler(schedule)),
        (diffusers.EDMDPMSolverMultistepScheduler, samplers.dpmpp(schedule)),
    ):
        oracle = scheduler(sigma_schedule=spacing)
        oracle.set_timesteps(9)
        np.testing.assert_allclose(oracle.sigmas.numpy(), schedule.sigma, rtol=1e-5)
        np.testing.assert_allclose(oracle.timesteps.numpy(), schedule.t[:-1], atol=1e-5)
        expected = theirs(oracle, start, "edm", schedule, monkeypatch)
        close(ours(table, start, "edm"), expected)


@pytest.mark.parametrize("steps", [1, 4, 7])
def test_consistency(steps, monkeypatch):
    chain = Discrete(BETAS)
    timesteps = schedules.distilled_timesteps(steps)
    start = noise()
    for name, last in (("lcm", "zero"), ("tcd", "smallest")):
        scheduler = {"lcm": diffusers.LCMScheduler, "tcd": diffusers.TCDScheduler}[name](
            **CHAIN, clip_sample=False
        )
        scheduler.set_timesteps(steps)
        np.testing.assert_array_equal(timesteps, scheduler.timesteps.numpy())
        schedule = chain.at(timesteps, last)
        table = samplers.lcm(schedule) if name == "lcm" else samplers.tcd(schedule, chain.levels)
        expected = theirs(scheduler, start, "noise", schedule, monkeypatch)
        close(ours(table, start, "noise"), expected)
