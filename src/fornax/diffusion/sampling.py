"""Sampling: one scan over a sampler's table.

Shapes: x_BX is a batch of B examples of any shape X; d_KBX the last K claims of the data.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fornax.config.errors import ConfigError
from fornax.diffusion.predictions import Point, Prediction, along, to_data
from fornax.diffusion.samplers import Table
from fornax.diffusion.schedules import Schedule

__all__ = [
    "KeepingNetwork",
    "Network",
    "Row",
    "State",
    "advance",
    "inpaint",
    "noised",
    "row_noise",
    "sample",
    "sample_keeping",
]

Network = Callable[[jax.Array, Point], jax.Array]
"""A network's output for x_BX at a point; conditions are closed over, see `guidance`."""

KeepingNetwork = Callable[[jax.Array, Point, Any, Any], tuple[jax.Array, Any]]
"""A network that keeps something from evaluation to evaluation: of x_BX, a point, what it kept and
what it receives for this evaluation, its output and what it keeps now."""


class Row(NamedTuple):
    """One step of a table: each () for all rows of the batch, or (B,) for rows at other steps."""

    point: Point
    correct: tuple[jax.Array, ...]
    update: tuple[jax.Array, ...]
    noise: jax.Array


class State(NamedTuple):
    """What a sampler carries from step to step.

    Attributes:
      x_BX: what the network sees next.
      z_BX: the state before it.
      d_KBX: the claims of the data before, the newest first.
    """

    x_BX: jax.Array
    z_BX: jax.Array
    d_KBX: jax.Array


def advance(state: State, data_BX: jax.Array, row: Row, noise_BX: jax.Array | None) -> State:
    """One step of any sampler: the sums that `fornax.diffusion.samplers` describes.

    Args:
      state: before the step.
      data_BX: the data that the network claims at `row.point`, of the dtype of the state.
      row: the step's coefficients.
      noise_BX: standard normal noise, or None where the sampler adds none.
    """
    d_KBX = jnp.concatenate([data_BX[None], state.d_KBX[:-1]])

    def combined(weights: tuple[jax.Array, ...], arrays: list[jax.Array]) -> jax.Array:
        return sum(
            (along(w, a) * a for w, a in zip(weights, arrays, strict=True)),
            start=jnp.zeros_like(data_BX),
        )

    z_BX = combined(row.correct, [state.x_BX, state.z_BX, *d_KBX])
    x_BX = combined(row.update, [z_BX, *d_KBX])
    if noise_BX is not None:
        x_BX = x_BX + along(row.noise, noise_BX) * noise_BX
    return State(x_BX, z_BX, d_KBX)


def row_noise(
    key: jax.Array, step: jax.Array | int, shape: tuple[int, ...], dtype: Any = jnp.float32
) -> jax.Array:
    """Standard normal noise of a step, each row of its own key.

    Args:
      key: () or (B,) typed keys; of one key row b has `fold_in(key, b)`, so that a row's noise
        depends on its key and step and not on the batch that it is in.
      step: () or (B,) steps of the rows.
      shape: (B, *X).
      dtype: of the noise.
    """
    keys = (
        key
        if key.ndim
        else jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(shape[0]))
    )
    steps = jnp.broadcast_to(jnp.asarray(step), keys.shape)
    return jax.vmap(lambda k, s: jax.random.normal(jax.random.fold_in(k, s), shape[1:], dtype))(
        keys, steps
    )


def noised(schedule: Schedule, noise_BX: jax.Array, data_BX: jax.Array | None = None) -> jax.Array:
    """Where a run of the schedule starts: alpha data + sigma noise at its first level.

    Args:
      schedule: for a start from images, `Schedule.from_strength`.
      noise_BX: standard normal, float32.
      data_BX: images or latents; without them the data counts as zero.
    """
    start = schedule.sigma[0].astype(noise_BX.dtype) * noise_BX
    if data_BX is None:
        return start
    return start + schedule.alpha[0].astype(noise_BX.dtype) * data_BX


def inpaint(
    data_BX: jax.Array, mask_BX: jax.Array, noise_BX: jax.Array
) -> Callable[[jax.Array, Point], jax.Array]:
    """For `sample(after=...)`: keep the data where the mask is 0, at every level of noise.

    Args:
      data_BX: the image or latent to keep.
      mask_BX: 1 where to draw, 0 where to keep; broadcasts against `data_BX`.
      noise_BX: the noise that the run started from.
    """

    def after(x_BX: jax.Array, point: Point) -> jax.Array:
        kept = along(point.alpha, x_BX) * data_BX + along(point.sigma, x_BX) * noise_BX
        return (mask_BX * x_BX + (1 - mask_BX) * kept).astype(x_BX.dtype)

    return after


def sample(
    network: Network,
    x_BX: jax.Array,
    table: Table,
    key: jax.Array | None = None,
    *,
    prediction: Prediction,
    sigma_data: float = 0.5,
    claim: Callable[[jax.Array, Point], jax.Array] | None = None,
    after: Callable[[jax.Array, Point], jax.Array] | None = None,
) -> jax.Array:
    """Run a sampler: one `lax.scan`, so a program's size does not grow with the steps.

    Args:
      network: x_BX and a point to the network's output. For `edm` it scales its own input by
        `predictions.preconditioning`'s c_in.
      x_BX: the start, `noised`; float32 (float64 under x64), kept so throughout.
      table: of `fornax.diffusion.samplers`; cast to the dtype of `x_BX`.
      key: () or (B,) typed keys for fresh noise, see `row_noise`.
      prediction: what the network's output is.
      sigma_data: for `edm`.
      claim: changes the data that the network claims, such as `jnp.clip` to its range.
      after: changes the state after each step, given the level that it has reached (`inpaint`).

    Returns:
      x_BX at the end of the schedule: clean data where that ends at sigma = 0.

    Raises:
      ConfigError: a sampler with noise and no key; a dtype that would lose the table; a noise
        prediction that starts from pure noise.
    """
    return sample_keeping(
        lambda x_BX, point, kept, told: (network(x_BX, point), kept),
        x_BX,
        table,
        key,
        kept=(),
        told=(),
        prediction=prediction,
        sigma_data=sigma_data,
        claim=claim,
        after=after,
    )[0]


def sample_keeping(
    network: KeepingNetwork,
    x_BX: jax.Array,
    table: Table,
    key: jax.Array | None = None,
    *,
    kept: Any,
    told: Any,
    prediction: Prediction,
    sigma_data: float = 0.5,
    claim: Callable[[jax.Array, Point], jax.Array] | None = None,
    after: Callable[[jax.Array, Point], jax.Array] | None = None,
) -> tuple[jax.Array, Any]:
    """`sample` with a network that keeps something, such as a cache of steps.

    Args:
      network: see `KeepingNetwork`.
      x_BX: as of `sample`, with what follows.
      table: likewise.
      key: likewise.
      kept: what the network starts with, a pytree of arrays.
      told: a pytree of arrays with a leading axis of M, of which evaluation i receives row i.
      prediction: as of `sample`, with what follows.
      sigma_data: likewise.
      claim: likewise.
      after: likewise.

    Returns:
      x_BX at the end, and what the network keeps then.

    Raises:
      ConfigError: as of `sample`.
    """
    if x_BX.dtype not in (jnp.float32, jnp.float64):
        raise ConfigError(
            f"sampling in {x_BX.dtype} loses the steps between noise levels; give x in float32, "
            "and let the network compute in what it likes"
        )
    if prediction == "noise" and (table.points[:-1, 1] == 0).any():
        raise ConfigError(
            "a noise prediction says nothing of the data where alpha is 0 (zero terminal SNR); "
            "use a network that predicts v, or a schedule without zero terminal SNR"
        )
    noisy = bool(table.noise.any())
    if noisy and key is None:
        raise ConfigError("this sampler adds fresh noise; give sample a key (jax.random.key(seed))")

    def cast(values: np.ndarray) -> jax.Array:
        return jnp.asarray(values, x_BX.dtype)

    def step(carry: tuple[State, Any], slices: Any) -> tuple[tuple[State, Any], None]:
        (state, kept), (at, then, correct, update, noise, number, told) = carry, slices
        row = Row(Point(*at), tuple(correct), tuple(update), noise)
        output_BX, kept = network(state.x_BX, row.point, kept, told)
        data_BX = to_data(prediction, output_BX, state.x_BX, row.point, sigma_data=sigma_data)
        if claim is not None:
            data_BX = claim(data_BX, row.point)
        fresh = row_noise(key, number, x_BX.shape, x_BX.dtype) if noisy else None  # pyrefly: ignore
        state = advance(state, data_BX, row, fresh)
        if after is not None:
            state = state._replace(x_BX=after(state.x_BX, Point(*then)))
        return (state, kept), None

    slices = (
        *map(cast, (table.points[:-1], table.points[1:], table.correct, table.update, table.noise)),
        jnp.arange(table.evaluations),
        told,
    )
    empty = jnp.zeros((table.memory, *x_BX.shape), x_BX.dtype)
    state, kept = jax.lax.scan(step, (State(x_BX, x_BX, empty), kept), slices)[0]
    return state.x_BX, kept
