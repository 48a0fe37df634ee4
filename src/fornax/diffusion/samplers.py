"""Samplers as tables of coefficients, computed in float64 on the host; `sample` runs any of them.

Each sampler here, one-step or multistep, deterministic or not, is linear in the state, the data
that the network claims, and fresh noise. With d_0 the newest such claim and d_k the k-th before it,
a step is

    z <- p x + q z + sum_k r_k d_k         z: the state that a corrector has improved
    x <- a z + sum_k b_k d_k + c noise     x: what the network sees next

so a sampler is the numbers p, q, r, a, b, c of each step. Below, alpha' and sigma' are the next
level, lambda is log(alpha / sigma), and h a step of lambda. The sources are DDPM (Ho et al. 2020),
DDIM (Song et al. 2021), Heun and Euler (Karras et al. 2022), DPM-Solver++ and its SDE (Lu et al.
2022), UniPC (Zhao et al. 2023), LCM (Luo et al. 2023), TCD (Zheng et al. 2024).
"""

import dataclasses
from collections.abc import Callable
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fornax.config.errors import ConfigError
from fornax.diffusion.schedules import Schedule

__all__ = [
    "SAMPLERS",
    "Table",
    "ancestral",
    "ddim",
    "ddpm",
    "dpmpp",
    "euler",
    "heun",
    "lcm",
    "tcd",
    "unipc",
]

Float = NDArray[np.float64]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Table:
    """A sampler on a schedule: M evaluations of the network, K claims remembered. All float64.

    Attributes:
      points: (M + 1, 3): t, alpha, sigma at each evaluation; the last row is where the run ends.
      correct: (M, 2 + K): p, q, r_0 ... r_(K-1).
      update: (M, 1 + K): a, b_0 ... b_(K-1).
      noise: (M,): c.
    """

    points: Float
    correct: Float
    update: Float
    noise: Float

    @property
    def evaluations(self) -> int:
        """How often the network runs, M."""
        return len(self.noise)

    @property
    def memory(self) -> int:
        """How many claims a step reads, K."""
        return self.update.shape[1] - 1


def _table(schedule: Schedule, memory: int = 1) -> Table:
    """A table without updates, whose corrector leaves x as it is."""
    steps = schedule.steps
    correct = np.zeros((steps, 2 + memory))
    correct[:, 0] = 1
    return Table(
        points=np.stack([schedule.t, schedule.alpha, schedule.sigma], 1),
        correct=correct,
        update=np.zeros((steps, 1 + memory)),
        noise=np.zeros(steps),
    )


def _log_snr(schedule: Schedule) -> Float:
    """(N + 1,) lambda: -inf where there is no data, inf where there is no noise."""
    with np.errstate(divide="ignore"):
        return np.log(schedule.alpha) - np.log(schedule.sigma)


def ddim(schedule: Schedule, eta: float = 0.0) -> Table:
    """DDIM: to the next level along the claimed noise, `eta` of the posterior's noise made fresh.

    x' = alpha' d + sqrt(sigma'^2 - s^2) (x - alpha d) / sigma + s noise,
    s = eta sigma' sqrt(1 - exp(-2h)).

    Without noise it is Euler's method in `sigma / alpha`, and on a flow in sigma; at eta = 1 it is
    Euler ancestral, and DDPM with the posterior's variance.

    Raises:
      ConfigError: eta outside [0, 1].
    """
    if not 0 <= eta <= 1:
        raise ConfigError(f"eta={eta:g}; it must lie in [0, 1]: 0 for no fresh noise, 1 for DDPM's")
    table = _table(schedule)
    alpha, sigma = schedule.alpha, schedule.sigma
    fresh = eta * sigma[1:] * np.sqrt(-np.expm1(-2 * np.diff(_log_snr(schedule))))
    kept = np.sqrt(np.maximum(sigma[1:] ** 2 - fresh**2, 0)) / sigma[:-1]
    table.update[:, 0] = kept
    table.update[:, 1] = alpha[1:] - kept * alpha[:-1]
    table.noise[:] = fresh
    return table


def euler(schedule: Schedule) -> Table:
    """Euler's method for the probability flow; see `ddim`."""
    return ddim(schedule)


def ancestral(schedule: Schedule) -> Table:
    """Euler ancestral; see `ddim`."""
    return ddim(schedule, eta=1.0)


def ddpm(schedule: Schedule, variance: Literal["small", "large"] = "small") -> Table:
    """DDPM's ancestral sampling.

    Args:
      schedule: of the chain (`vp`), every step or some.
      variance: of the fresh noise: the posterior's, or the step's own beta. None at the last step.
    """
    table = ddim(schedule, eta=1.0)
    if variance == "large":
        ratio = schedule.alpha[:-1] / schedule.alpha[1:]
        table.noise[:-1] = np.sqrt(1 - ratio**2)[:-1]
    return table


def heun(schedule: Schedule) -> Table:
    """Heun's method: two evaluations per step, one for the last, to no noise.

    In x / alpha over sigma / alpha on `vp` and `ve`; in x over sigma on `flow`.

    Raises:
      ConfigError: a start at infinite noise.
    """
    scale = np.ones_like(schedule.alpha) if schedule.path == "flow" else schedule.alpha
    if scale[0] == 0:
        raise ConfigError(
            "heun integrates over sigma / alpha, which is infinite at the start of a chain with "
            "zero terminal SNR; use ddim, or dpm++"
        )
    level = schedule.sigma / scale
    at = np.stack([schedule.t, schedule.alpha, schedule.sigma], 1)
    points, correct, update = [], [], []
    for i in range(schedule.steps):
        # The slope at a level is (x / scale - d) / level, on every path.
        step, grown = level[i + 1] - level[i], scale[i + 1]
        slope = np.array([1 / scale[i], -1]) / level[i]  # of x and d_0
        points.append(at[i])
        correct.append([1, 0, 0, 0])
        update.append([grown * (1 / scale[i] + step * slope[0]), grown * step * slope[1], 0])
        if level[i + 1] == 0:
            continue
        # z <- z + step (slope + slope there) / 2: z was x at level i, and d_1 its claim.
        half = grown * step / 2
        points.append(at[i + 1])
        correct.append(
            [
                half / (level[i + 1] * grown),
                grown / scale[i] + half * slope[0],
                -half / level[i + 1],
                half * slope[1],
            ]
        )
        update.append([1, 0, 0])
    return Table(
        points=np.array([*points, at[-1]]),
        correct=np.array(correct, np.float64),
        update=np.array(update, np.float64),
        noise=np.zeros(len(update)),
    )


def _phi(h: float) -> tuple[float, float, float]:
    """Integrals of exp(-(h - s)) s^k / (k! h^k) over a step, k = 0, 1, 2, of its claims."""
    if np.isinf(h):
        return 1.0, 1.0, 0.5
    first = -np.expm1(-h)
    second = 1 - first / h
    return first, second, 0.5 - second / h


def dpmpp(
    schedule: Schedule,
    order: Literal[1, 2, 3] = 2,
    *,
    sde: bool = False,
    solver: Literal["midpoint", "heun"] = "midpoint",
) -> Table:
    """DPM-Solver++ multistep, "2M" and "3M", and with `sde` "2M SDE" and "3M SDE".

    The claims are extrapolated over lambda by differences of the last `order` of them; the first
    steps have fewer. The last is of order one where it ends without noise or the run has less than
    15 steps, and of order two at most before it in so short a run.

    Args:
      schedule: any path.
      order: of the deterministic method.
      sde: fresh noise sigma' sqrt(1 - exp(-2h)) at each step.
      solver: which of the two second-order formulas.

    Raises:
      ConfigError: an order or a solver that does not exist.
    """
    if order not in (1, 2, 3) or solver not in ("midpoint", "heun"):
        raise ConfigError(
            f"order={order}, solver={solver!r}; use order 1, 2 or 3 and solver midpoint or heun"
        )
    table = _table(schedule, order)
    alpha, sigma, h = schedule.alpha, schedule.sigma, np.diff(_log_snr(schedule))
    steps = schedule.steps
    for i in range(steps):
        left = steps - i if steps < 15 else (1 if sigma[i + 1] == 0 and i == steps - 1 else order)
        now = min(order, i + 1, left)
        # The SDE integrates exp(-2(h - s)): the same functions at twice the step.
        phi = _phi(2 * h[i] if sde else h[i])
        weights = np.zeros(order)
        weights[0] = alpha[i + 1] * phi[0]
        if now >= 2:
            first = _differences(h[i], h[i - 1], h[i - 2] if now == 3 else None)
            middle = phi[0] / 2 if solver == "midpoint" and now == 2 else phi[1]
            weights[: len(first[0])] += alpha[i + 1] * middle * first[0]
            if now == 3:
                weights += alpha[i + 1] * phi[2] * first[1]
        fade = np.exp(-h[i]) if sde else 1.0
        table.update[i, 0] = sigma[i + 1] / sigma[i] * fade
        table.update[i, 1:] = weights
        if sde:
            table.noise[i] = sigma[i + 1] * np.sqrt(-np.expm1(-2 * h[i]))
    return table


def _differences(h: float, h_0: float, h_1: float | None) -> tuple[Float, Float]:
    """Divided differences of the claims at lambda, in steps of h, as weights of d_0, d_1, d_2."""
    r0 = h_0 / h
    if h_1 is None:
        return np.array([1, -1]) / r0, np.zeros(2)
    r1 = h_1 / h
    newer, older = np.array([1, -1, 0]) / r0, np.array([0, 1, -1]) / r1
    # A claim at infinite noise is infinitely far away: r1 = inf takes it out of both.
    bend = (newer - older) / (r0 + r1)
    return newer + r0 * bend, bend


def unipc(
    schedule: Schedule, order: Literal[1, 2, 3] = 2, solver: Literal["bh1", "bh2"] = "bh2"
) -> Table:
    """UniPC: a multistep predictor, and a corrector that uses the same evaluation once more.

    Args:
      schedule: any path, from finite noise.
      order: of the predictor; the corrector is one better. The last steps have lower ones.
      solver: the function B(h); bh1 is for few steps without guidance.

    Raises:
      ConfigError: an order or a solver that does not exist, or a start at infinite noise.
    """
    if order not in (1, 2, 3) or solver not in ("bh1", "bh2"):
        raise ConfigError(f"order={order}, solver={solver!r}; use order 1, 2, 3 and bh1 or bh2")
    if schedule.alpha[0] == 0 and schedule.path == "vp":
        raise ConfigError(
            "unipc starts from finite noise, and a chain with zero terminal SNR does not; use "
            "ddim, or dpm++"
        )
    table = _table(schedule, order + 1)
    used = [min(order, i + 1, schedule.steps - i) for i in range(schedule.steps)]
    for i, now in enumerate(used):
        a, weights = _unipc_step(schedule, i, now, solver, corrects=False)
        table.update[i, 0] = a
        table.update[i, 1 : 1 + now] = weights
        if i:
            q, weights = _unipc_step(schedule, i - 1, used[i - 1], solver, corrects=True)
            table.correct[i, :2] = 0, q
            table.correct[i, 2 : 3 + used[i - 1]] = weights
    return table


def _unipc_step(
    schedule: Schedule, i: int, order: int, solver: str, corrects: bool
) -> tuple[float, Float]:
    """From level i to i + 1: the state's coefficient and the claims', newest first.

    The corrector's newest claim is the one at level i + 1; the predictor has none there.
    """
    lam, alpha, sigma = _log_snr(schedule), schedule.alpha, schedule.sigma
    h = lam[i + 1] - lam[i]
    # At infinite lambda only order 1 is asked for: the claim itself.
    ratios = [(lam[i - k] - lam[i]) / h for k in range(1, order)] + [1.0]
    count = order if corrects else order - 1
    b = -h if solver == "bh1" else np.expm1(-h)
    weights = np.zeros(order + 1)  # of the claims at levels i + 1, i, i - 1, ...
    weights[1] = -alpha[i + 1] * np.expm1(-h)
    if count:
        rhos = _unipc_weights(np.array(ratios[:count] if not corrects else ratios), -h, b)
        if count == 1:
            rhos = np.array([0.5])  # the simplified first coefficient of the published code
        for k, rho in enumerate(rhos):
            claim = k + 2 if k < order - 1 else 0
            share = -alpha[i + 1] * b * rho / ratios[k if claim else -1]
            weights[claim] += share
            weights[1] -= share
    return sigma[i + 1] / sigma[i], weights if corrects else weights[1:]


def _unipc_weights(ratios: Float, hh: float, b: float) -> Float:
    """Solves the conditions of order for the differences' weights (UniPC, theorem 3.1)."""
    count = len(ratios)
    rows = np.stack([ratios**k for k in range(count)])
    right, phi, factorial = np.zeros(count), np.expm1(hh) / hh - 1, 1.0
    for k in range(count):
        right[k] = phi * factorial / b
        factorial *= k + 2
        phi = phi / hh - 1 / factorial
    return np.asarray(np.linalg.solve(rows, right), np.float64)


def lcm(schedule: Schedule, sigma_data: float = 0.5, scaling: float = 10.0) -> Table:
    """A latent consistency model's steps: to the data in one, then noise again.

    The claim is `out d + skip x`, which is x itself at t = 0 (Luo et al. 2023); take the schedule
    `Discrete.at(distilled_timesteps(steps))`. The last step adds no noise.
    """
    table = _table(schedule)
    scaled = schedule.t[:-1] * scaling
    skip = sigma_data**2 / (scaled**2 + sigma_data**2)
    out = scaled / np.sqrt(scaled**2 + sigma_data**2)
    forward = schedule.alpha[1:].copy()
    forward[-1] = 1.0
    table.update[:, 0] = forward * skip
    table.update[:, 1] = forward * out
    table.noise[:-1] = schedule.sigma[1:-1]
    return table


def tcd(
    schedule: Schedule,
    levels: Callable[[Float], tuple[Float, Float]],
    gamma: float = 0.3,
) -> Table:
    """Trajectory consistency: along the claimed noise past the next level, then noise again.

    Args:
      schedule: `Discrete.at(distilled_timesteps(steps))`, its `last` as the model was trained.
      levels: alpha and sigma at timesteps, `Discrete.levels`.
      gamma: in [0, 1]: how far past, as a share of the next timestep; 0 is DDIM.

    Raises:
      ConfigError: gamma outside [0, 1].
    """
    if not 0 <= gamma <= 1:
        raise ConfigError(f"gamma={gamma:g}; it must lie in [0, 1], 0 for no fresh noise")
    table = _table(schedule)
    alpha, sigma = levels(np.floor((1 - gamma) * schedule.t[1:]))
    alpha[-1], sigma[-1] = schedule.alpha[-1], schedule.sigma[-1]
    kept = sigma / schedule.sigma[:-1]
    back = schedule.alpha[1:] / alpha
    table.update[:, 0] = back * kept
    table.update[:, 1] = back * (alpha - kept * schedule.alpha[:-1])
    table.noise[:] = np.sqrt(np.maximum(1 - back**2, 0))
    return table


SAMPLERS: dict[str, Callable[[Schedule], Table]] = {
    "ddpm": ddpm,
    "ddim": ddim,
    "euler": euler,
    "euler-ancestral": ancestral,
    "heun": heun,
    "dpm++2m": dpmpp,
    "dpm++2m-sde": lambda schedule: dpmpp(schedule, sde=True),
    "dpm++3m": lambda schedule: dpmpp(schedule, order=3),
    "dpm++3m-sde": lambda schedule: dpmpp(schedule, order=3, sde=True),
    "unipc": unipc,
    "lcm": lcm,
}
"""Samplers that need a schedule and nothing else, by name (`tcd` also needs its chain)."""
