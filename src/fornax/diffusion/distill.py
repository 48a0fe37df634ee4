"""Distillation to few steps: consistency (LCM) and distribution matching (DMD2), as functions.

They take functions of arrays and do not depend on a model; `fornax.diffusion.learners` trains with
them. A claim is the data that a network's output stands for (`predictions.to_data`), so that what a
network predicts does not matter. What such a student has learnt is sampled by `samplers.lcm`: its
claim, noised again to the next level.

Shapes: x_BX is a batch of B examples of any shape X.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from fornax.config.errors import ConfigError
from fornax.diffusion.predictions import Point, along
from fornax.diffusion.samplers import Table
from fornax.diffusion.sampling import row_noise
from fornax.diffusion.schedules import Schedule

__all__ = ["Claim", "consistency_losses", "few_step_sample", "matching_losses", "solver_levels"]

Claim = Callable[[jax.Array, Point], jax.Array]
"""x_BX at a point with (B,) values to the data that a network claims, float32."""


def solver_levels(schedule: Schedule, uniform_B: jax.Array) -> tuple[Point, Point]:
    """A random level of a schedule for each row, and the next one, with less noise.

    Args:
      schedule: the teacher's steps, N of them.
      uniform_B: (B,) in [0, 1).
    """
    levels = [jnp.asarray(v, uniform_B.dtype) for v in (schedule.t, schedule.alpha, schedule.sigma)]
    index = jnp.minimum((uniform_B * schedule.steps).astype(jnp.int32), schedule.steps - 1)
    return Point(*(v[index] for v in levels)), Point(*(v[index + 1] for v in levels))


def consistency_losses(
    student: Claim,
    teacher: Claim,
    data_BX: jax.Array,
    noise_BX: jax.Array,
    levels: tuple[Point, Point],
    *,
    huber: float = 0.001,
) -> jax.Array:
    """The student's claim should not change along the teacher's path (Song et al. 2023; LCM, Luo et
    al. 2023).

    From x at the first level one DDIM step along the teacher's claim leads to the second. The loss
    there is sqrt(|student - target|^2 + c^2) - c, c = `huber` sqrt(elements), as a mean over
    elements. The target, without gradient, is g' / g of the student's own claim after the step and
    1 - g' / g of the teacher's before it, g = 1 - (alpha / (alpha + sigma))^4 at the two levels.
    Where the step ends without noise that is the teacher's alone, the end of the path. Elsewhere
    it is what keeps a network that predicts data stable: its errors would be carried from level to
    level undamped, where those of a predicted noise or velocity shrink with sigma. The path's end
    is thereby a mean of the teacher's claims along it with density dg, nearly all near the data,
    whatever the number of levels. No average of the student is its target: it would bias what is
    learnt (Song and Dhariwal 2024).

    Args:
      student: the student's claims.
      teacher: the teacher's, under guidance where the student is to learn it.
      data_BX: clean examples, float32.
      noise_BX: standard normal, float32.
      levels: of `solver_levels`.
      huber: c of an element; 0 for the distance itself.

    Returns:
      (B,) float32.
    """
    here, there = levels

    def mixed(point: Point, data: jax.Array, noise: jax.Array) -> jax.Array:
        return along(point.alpha, data) * data + along(point.sigma, data) * noise

    x_BX = mixed(here, data_BX, noise_BX)
    claimed_BX = teacher(x_BX, here)
    claimed_noise_BX = (x_BX - along(here.alpha, x_BX) * claimed_BX) / along(here.sigma, x_BX)
    next_BX = mixed(there, claimed_BX, claimed_noise_BX)
    kept_BX = along(_noisiness(there) / _noisiness(here), x_BX)
    target_BX = kept_BX * student(next_BX, there) + (1 - kept_BX) * claimed_BX
    error_BX = student(x_BX, here) - jax.lax.stop_gradient(target_BX)
    axes = tuple(range(1, error_BX.ndim))
    squared_B = jnp.mean(error_BX**2, axes)
    # The derivative of a root is infinite at 0, and errors of 0 occur.
    return jnp.sqrt(jnp.maximum(squared_B + huber**2, 1e-20)) - huber


def _noisiness(point: Point) -> jax.Array:
    """0 on data to 1 on noise: all but near the data it is nearly 1."""
    return 1 - (point.alpha / (point.alpha + point.sigma)) ** 4


def few_step_sample(
    student: Claim, noise_BX: jax.Array, table: Table, key: jax.Array, steps_B: jax.Array
) -> tuple[jax.Array, Point]:
    """What a student's sampler has before step `steps_B` of each row, to train that step on (DMD2's
    backward simulation, Yin et al. 2024, section 4.5).

    Args:
      student: the student's claims; they get no gradient here.
      noise_BX: the start, standard normal, float32.
      table: `samplers.lcm` of the few steps.
      key: of `sampling.sample`, whose noise between steps is the same.
      steps_B: (B,) int32 in [0, steps).

    Returns:
      x_BX before the row's step, and its point.

    Raises:
      ConfigError: a sampler whose steps are not claims noised again.
    """
    if table.memory != 1 or np.abs(table.update[:, 0]).max() > 1e-3:
        raise ConfigError(
            "this sampler carries its state from step to step, and a student of few steps does "
            "not; use the table of samplers.lcm"
        )
    points = jnp.asarray(table.points, noise_BX.dtype)
    shape = noise_BX.shape

    def point_of(step: jax.Array | int) -> Point:
        return Point(*(jnp.broadcast_to(points[step, i], shape[:1]) for i in range(3)))

    x_BX = found_BX = points[0, 2] * noise_BX
    for step in range(1, table.evaluations):
        claimed_BX = jax.lax.stop_gradient(student(x_BX, point_of(step - 1)))
        fresh_BX = row_noise(key, step - 1, shape, noise_BX.dtype)
        x_BX = points[step, 1] * claimed_BX + points[step, 2] * fresh_BX
        found_BX = jnp.where(along(steps_B == step, x_BX), x_BX, found_BX)
    return jax.lax.stop_gradient(found_BX), Point(*(points[steps_B, i] for i in range(3)))


def matching_losses(
    drawn_BX: jax.Array, real: Claim, fake: Claim, noise_BX: jax.Array, point: Point
) -> jax.Array:
    """The gradient that moves what a student draws towards what the teacher finds likely.

    Distribution matching (Yin et al. 2024, eq. 7 and 8): with x the drawn example, noised to
    `point`, the gradient is (fake(x) - real(x)) / mean |drawn - real(x)|, put as half the mean
    squared distance to drawn less that gradient.

    Args:
      drawn_BX: examples that the student drew, with gradient, float32.
      real: the teacher's claims.
      fake: those of a network that is trained on what the student draws.
      noise_BX: standard normal, float32.
      point: the rows' noise levels.

    Returns:
      (B,) float32, whose derivative by `drawn_BX` is that gradient over the number of elements.
    """
    fixed_BX = jax.lax.stop_gradient(drawn_BX)
    x_BX = along(point.alpha, fixed_BX) * fixed_BX + along(point.sigma, fixed_BX) * noise_BX
    real_BX, fake_BX = real(x_BX, point), fake(x_BX, point)
    axes = tuple(range(1, x_BX.ndim))
    scale_B = jnp.mean(jnp.abs(fixed_BX - real_BX), axes)
    gradient_BX = (fake_BX - real_BX) / along(jnp.maximum(scale_B, 1e-6), x_BX)
    wanted_BX = jax.lax.stop_gradient(fixed_BX - gradient_BX)
    return 0.5 * jnp.mean((drawn_BX - wanted_BX) ** 2, axes)
