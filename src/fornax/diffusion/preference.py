"""Preferences and rewards: Diffusion-DPO, and stochastic sampling with log-probabilities for GRPO.

The losses themselves are those of `fornax.tune.losses`; here is what stands for a log-probability.

Shapes: x_BX is a batch of B examples of any shape X; P pairs; M steps of a sampler.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fornax.config.errors import ConfigError
from fornax.diffusion.predictions import Point, Prediction, along, to_data
from fornax.diffusion.samplers import Table
from fornax.diffusion.sampling import Network, Row, State, advance, row_noise
from fornax.tune import losses

__all__ = [
    "Trajectory",
    "diffusion_dpo",
    "draw",
    "flow_grpo",
    "step_kl",
    "step_logps",
    "step_means",
]


def diffusion_dpo(
    errors_P2: jax.Array, reference_errors_P2: jax.Array, *, beta: float = 5000.0
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Diffusion-DPO (Wallace et al. 2023, eq. 14): DPO whose log-probabilities are -error / 2.

    -log sigmoid(-beta / 2 ((e_w - e_w_ref) - (e_l - e_l_ref))), w the preferred and l the other.

    Args:
      errors_P2: mean squared errors of the model's prediction for (preferred, other) at one noise
        level and with one noise per pair, `Objective.losses` (their T omega is its weight, and
        beta).
      reference_errors_P2: the reference's, of the same noise.
      beta: above 0; 2000 to 5000 for mean errors.

    Returns:
      loss [P] and the metrics of `tune.losses.dpo`.

    Raises:
      ConfigError: beta out of range, or arrays that are not pairs.
    """
    return losses.dpo(-errors_P2 / 2, -reference_errors_P2 / 2, beta=beta)


class Trajectory(NamedTuple):
    """One run of a stochastic sampler.

    Attributes:
      x_MBX: the state before each step, and at the end: M + 1.
      logps_MB: log-probability of each step, as `step_logps` has it.
    """

    x_MBX: jax.Array
    logps_MB: jax.Array


def random_steps(table: Table) -> int:
    """How many steps of a table add noise: all but the last, or all.

    Raises:
      ConfigError: a sampler whose steps have no density of their own.
    """
    plain = np.allclose(table.correct, [1.0] + [0.0] * (table.correct.shape[1] - 1))
    noisy = table.noise > 0
    if table.memory != 1 or not plain or not noisy[:-1].all() or not noisy.any():
        raise ConfigError(
            "this sampler's steps are not normal around one evaluation of the network, so they "
            "have no log-probability; use samplers.ddim(schedule, eta) with eta in (0, 1] and two "
            "steps at least"
        )
    return int(noisy.sum())


def step_means(
    network: Network, x_BX: jax.Array, row: Row, *, prediction: Prediction, sigma_data: float = 0.5
) -> jax.Array:
    """Mean of the state after a step, () or (B,) coefficients: the step without its noise."""
    output_BX = network(x_BX, row.point)
    data_BX = to_data(prediction, output_BX, x_BX, row.point, sigma_data=sigma_data)
    return advance(State(x_BX, x_BX, jnp.zeros_like(x_BX)[None]), data_BX, row, None).x_BX


def step_logps(mean_BX: jax.Array, deviation: jax.Array, next_BX: jax.Array) -> jax.Array:
    """(B,) log-density of `next_BX` under a normal, a mean over elements (Liu et al. 2025).

    Args:
      mean_BX: of `step_means`.
      deviation: () or (B,), the table's noise.
      next_BX: where the step led.
    """
    scale = along(deviation, mean_BX)
    density = -0.5 * ((next_BX - mean_BX) / scale) ** 2 - jnp.log(scale) - 0.5 * np.log(2 * np.pi)
    return jnp.mean(density, tuple(range(1, density.ndim)))


def step_kl(mean_BX: jax.Array, reference_BX: jax.Array, deviation: jax.Array) -> jax.Array:
    """(B,) divergence of a step from the reference's, a mean over elements: both have one
    deviation, so it is (mean - reference)^2 / (2 deviation^2)."""
    apart = (mean_BX - reference_BX) / along(deviation, mean_BX)
    return 0.5 * jnp.mean(apart**2, tuple(range(1, apart.ndim)))


def rows_of(table: Table, dtype: jnp.dtype) -> Row:
    """All steps of a table, each coefficient (M,)."""
    cast = [jnp.asarray(v, dtype) for v in (table.points[:-1], table.correct, table.update)]
    points, correct, update = cast
    return Row(Point(*points.T), tuple(correct.T), tuple(update.T), jnp.asarray(table.noise, dtype))


def draw(
    network: Network,
    x_BX: jax.Array,
    table: Table,
    key: jax.Array,
    *,
    prediction: Prediction,
    sigma_data: float = 0.5,
) -> Trajectory:
    """Sample as `sampling.sample` does, and keep every state.

    Args:
      network: x_BX and a point to the network's output.
      x_BX: the start, float32.
      table: a stochastic sampler, `samplers.ddim(schedule, eta)`: flows and chains keep their
        marginals at any eta and any number of steps.
      key: () or (B,) typed keys, see `row_noise`.
      prediction: what the network's output is.
      sigma_data: for `edm`.

    Raises:
      ConfigError: a sampler without log-probabilities.
    """
    random_steps(table)

    def step(x_BX: jax.Array, slices: tuple[Row, jax.Array]) -> tuple[jax.Array, Trajectory]:
        row, number = slices
        mean_BX = step_means(network, x_BX, row, prediction=prediction, sigma_data=sigma_data)
        fresh_BX = row_noise(key, number, x_BX.shape, x_BX.dtype)
        next_BX = mean_BX + row.noise * fresh_BX
        # Of a last step without noise there is no density; 0 keeps it out of sums.
        safe = jnp.where(row.noise > 0, row.noise, 1)
        logps_B = jnp.where(row.noise > 0, step_logps(mean_BX, safe, next_BX), 0)
        return next_BX, Trajectory(x_BX, logps_B)

    steps = (rows_of(table, x_BX.dtype), jnp.arange(table.evaluations))
    end_BX, path = jax.lax.scan(step, x_BX, steps)
    return Trajectory(jnp.concatenate([path.x_MBX, end_BX[None]]), path.logps_MB)


def flow_grpo(
    network: Network,
    reference: Network | None,
    path_MBX: jax.Array,
    old_logps_BM: jax.Array,
    advantages_B: jax.Array,
    table: Table,
    *,
    prediction: Prediction,
    sigma_data: float = 0.5,
    clip: float = 0.2,
    kl: float = 0.04,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The clipped surrogate of the random steps, and the divergence of all steps (Flow-GRPO, Liu et
    al. 2025).

    mean over random steps of (surrogate + kl D) + kl D of the last step, D as `step_kl` has it. The
    last step of `ddim` adds no noise, so rewards say nothing of the network there; but what it
    claims there changes too, since it shares its parameters with the other steps, and it is most of
    what is seen. Its divergence, with the deviation of the step before, is all that holds it: on
    points around centres, without it the reward rose and then fell below where it began.

    Args:
      network: x_BX and a point to the output of the network that is trained.
      reference: that of the model that the run began with; None where `kl` is 0.
      path_MBX: states before each random step and after the last of them, of `draw`.
      old_logps_BM: their log-probabilities where they were drawn.
      advantages_B: of the examples.
      table: that they were drawn with.
      prediction: what the network's output is.
      sigma_data: for `edm`.
      clip: range of the ratio of probabilities, of means over elements.
      kl: weight of the divergence.

    Returns:
      (B,) losses, and the metrics of `tune.losses.policy_gradient` and the divergence, (B,) each.

    Raises:
      ConfigError: a sampler without log-probabilities, or `kl` without a reference.
    """
    random, rows = random_steps(table), rows_of(table, path_MBX.dtype)
    if kl and reference is None:
        raise ConfigError(f"kl={kl:g} is of the divergence from a reference; give one, or kl 0")

    def mean(network: Network, x_BX: jax.Array, row: Row) -> jax.Array:
        return step_means(network, x_BX, row, prediction=prediction, sigma_data=sigma_data)

    def apart(mean_BX: jax.Array, x_BX: jax.Array, row: Row, noise: jax.Array) -> jax.Array:
        if not kl or reference is None:
            return jnp.zeros(len(x_BX))
        return step_kl(mean_BX, jax.lax.stop_gradient(mean(reference, x_BX, row)), noise)

    def step(slices: tuple[jax.Array, jax.Array, Row]) -> tuple[jax.Array, jax.Array]:
        x_BX, next_BX, row = slices
        mean_BX = mean(network, x_BX, row)
        return step_logps(mean_BX, row.noise, next_BX), apart(mean_BX, x_BX, row, row.noise)

    noisy = jax.tree.map(lambda c: c[:random], rows)
    logps_MB, kl_MB = jax.lax.map(step, (path_MBX[:-1], path_MBX[1:], noisy))
    kl_B = jnp.mean(kl_MB, 0)
    if kl and random < table.evaluations:
        x_BX, row = path_MBX[-1], jax.tree.map(lambda c: c[-1], rows)
        kl_B += apart(mean(network, x_BX, row), x_BX, row, noisy.noise[-1])
    loss_BM, metrics = losses.policy_gradient(
        logps_MB.T,
        old_logps_BM,
        advantages_B[:, None],
        jnp.ones_like(old_logps_BM),
        clip_low=clip,
        clip_high=clip,
    )
    metrics = {name: jnp.mean(each, 1) for name, each in metrics.items()}
    return jnp.mean(loss_BM, 1) + kl * kl_B, {**metrics, "kl": kl_B}
