"""Objectives of diffusion and flow training: pure functions of arrays, each row by itself.

A row's noise level comes from a uniform number u: a density warps u to a time in (0, 1) (0 data,
1 noise), a shift moves it, a path turns it into alpha and sigma. Losses are weighted squared errors
of one row; nothing is normalised over the batch, so a row counts the same in any batch.

Weights are stated in the space in which they were published (the noise's error, the data's, the
velocity's) and converted to the network's. With err the data's error, the noise's is
(alpha / sigma) err, the velocity's of a flow (alpha + sigma) / sigma err.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from statistics import NormalDist
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import ndtri

from fornax.config.errors import ConfigError
from fornax.diffusion.predictions import Point, Prediction, along, preconditioning, target
from fornax.diffusion.schedules import (
    Discrete,
    Schedule,
    cosine_betas,
    edm,
    flow,
    linear_betas,
    scaled_linear_betas,
    shifted,
    zero_terminal_snr,
)

__all__ = ["BETAS", "Betas", "Chain", "Objective", "example_noise", "example_uniform", "stratified"]

Betas = Literal["linear", "scaled_linear", "cosine"]
BETAS: Mapping[str, Callable[[float, float, int], Any]] = {
    "linear": linear_betas,
    "scaled_linear": scaled_linear_betas,
    "cosine": lambda first, last, steps: cosine_betas(steps),
}
"""Variances of a chain, by their rule: (first, last, steps) to float64 (steps,)."""

SMALLEST = 1e-4
"""Alpha and sigma are at least this in weights, which are thereby finite at both ends."""


def example_keys(seed: int, step: jax.Array | int, ids_B: jax.Array) -> jax.Array:
    """(B,) keys from seed, step and each example's id alone: equal on any mesh and in any batch."""
    key = jax.random.key(seed)
    steps_B = jnp.broadcast_to(jnp.asarray(step), ids_B.shape)
    return jax.vmap(lambda s, number: jax.random.fold_in(jax.random.fold_in(key, s), number))(
        steps_B, ids_B
    )


def example_noise(
    seed: int, step: jax.Array | int, ids_B: jax.Array, shape: tuple[int, ...]
) -> jax.Array:
    """Standard normal noise (B, *shape), float32, of each example at a step.

    Args:
      seed: of the run.
      step: of the run, () or (B,); an example met again has other noise.
      ids_B: (B,) int32 or uint32, the examples' ids.
      shape: of one example.
    """

    def draw(key: jax.Array) -> jax.Array:
        return jax.random.normal(jax.random.fold_in(key, 0), shape, jnp.float32)

    return jax.vmap(draw)(example_keys(seed, step, ids_B))


def example_uniform(seed: int, step: jax.Array | int, ids_B: jax.Array) -> jax.Array:
    """(B,) float32 in (0, 1), of each example at a step; independent of `example_noise`."""

    def draw(key: jax.Array) -> jax.Array:
        return jax.random.uniform(jax.random.fold_in(key, 1), (), jnp.float32, 2.0**-24, 1.0)

    return jax.vmap(draw)(example_keys(seed, step, ids_B))


def stratified(u_B: jax.Array, places_B: jax.Array, count: int) -> jax.Array:
    """Uniform numbers, one in each of `count` equal strata: less variance of a batch's loss.

    Args:
      u_B: (B,) in [0, 1).
      places_B: (B,) integers, the rows' places in the global batch of `count` rows: of the global
        batch, so that any mesh sees the same.
      count: rows of the global batch.
    """
    return (places_B + u_B) / count


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chain:
    """A discrete chain of noise levels (Ho et al. 2020); the defaults are Stable Diffusion's.

    Attributes:
      betas: the rule of its variances; `cosine` has no first and last.
      first: the smallest variance.
      last: the greatest.
      steps: noise levels.
      zero_snr: whether the last level is pure noise (Lin et al. 2024, algorithm 1).

    Raises:
      ConfigError: variances that do not grow within (0, 1), or fewer than two levels.
    """

    betas: Betas = "scaled_linear"
    first: float = 0.00085
    last: float = 0.012
    steps: int = 1000
    zero_snr: bool = False

    def __post_init__(self) -> None:
        if self.steps < 2 or not 0 < self.first <= self.last < 1:
            raise ConfigError(
                f"chain.first={self.first:g}, chain.last={self.last:g}, chain.steps={self.steps}; "
                "use 0 < first <= last < 1 and at least 2 steps"
            )

    def discrete(self) -> Discrete:
        """The chain's levels."""
        betas = BETAS[self.betas](self.first, self.last, self.steps)
        return Discrete(zero_terminal_snr(betas) if self.zero_snr else betas)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Objective:
    """What a network is trained to predict, at which noise levels, with which weight.

    Attributes:
      path: `flow` (alpha = 1 - sigma), `cosine` (alpha = cos(pi t / 2), variance preserving),
        `edm` (alpha = 1, log sigma normal with `mean` and `deviation`, its only density), or
        `discrete`, the levels of `chain`.
      prediction: the network's output.
      density: of times: `uniform`; `logit-normal`, of a normal with `mean` and `deviation`
        (Esser et al. 2024, eq. 19); `mode`, of `mode_scale` (their eq. 20).
      weight: `constant`, 1 on the prediction itself; `min-snr`, min(alpha^2 / sigma^2, `gamma`) on
        the data (Hang et al. 2023); `sigmoid`, sigmoid(`bias` - log SNR) on the noise (Kingma and
        Gao 2023); `cosmap`, 2 / (pi (1 - 2 sigma + 2 sigma^2)) on the velocity (Esser et al. 2024);
        `edm`, 1 / c_out^2 on the data (Karras et al. 2022).
      shift: of the time towards noise for larger images, `schedules.resolution_shift`; on `cosine`
        the same factor of sigma / alpha (Hoogeboom et al. 2023).
      mean: of the density; EDM's own is -1.2.
      deviation: of the density; EDM's own is 1.2.
      mode_scale: of `mode`, in [-1, 2 / (pi - 2)].
      gamma: of `min-snr`.
      bias: of `sigmoid`.
      sigma_data: standard deviation of the data, for `edm`.
      chain: of `discrete`.

    Raises:
      ConfigError: a combination without meaning.
    """

    path: Literal["flow", "cosine", "edm", "discrete"] = "flow"
    prediction: Prediction = "flow"
    density: Literal["uniform", "logit-normal", "mode"] = "logit-normal"
    weight: Literal["constant", "min-snr", "sigmoid", "cosmap", "edm"] = "constant"
    shift: float = 1.0
    mean: float = 0.0
    deviation: float = 1.0
    mode_scale: float = 1.29
    gamma: float = 5.0
    bias: float = 0.0
    sigma_data: float = 0.5
    chain: Chain | None = None

    def __post_init__(self) -> None:
        self._check_chain()
        scales = (self.shift, self.deviation, self.gamma, self.sigma_data)
        if not all(0 < scale < math.inf for scale in scales):
            raise ConfigError(
                f"shift={self.shift:g}, deviation={self.deviation:g}, gamma={self.gamma:g}, "
                f"sigma_data={self.sigma_data:g}; each must be above 0 and finite"
            )
        if not (math.isfinite(self.mean) and math.isfinite(self.bias)):
            raise ConfigError(f"mean={self.mean:g}, bias={self.bias:g}; both must be finite")
        if "edm" in (self.prediction, self.weight) and self.path != "edm":
            raise ConfigError(
                f"prediction={self.prediction!r} and weight={self.weight!r} on path={self.path!r}; "
                "EDM's preconditioning is for data without a factor: set path='edm'"
            )
        if self.path == "edm" and self.density != "logit-normal":
            raise ConfigError(
                f"density={self.density!r} on path='edm', whose log sigma is normal; leave density "
                "out and set mean and deviation"
            )
        if self.weight == "cosmap" and self.path != "flow":
            raise ConfigError(
                f"weight='cosmap' on path={self.path!r}; it is a density of the flow's times: set "
                "path='flow'"
            )

    def _check_chain(self) -> None:
        if (self.chain is not None) != (self.path == "discrete"):
            raise ConfigError(
                f"path={self.path!r} with chain={self.chain}; a chain is the levels of "
                "path='discrete', which needs one: set both or neither"
            )
        if self.chain is None:
            return
        if self.shift != 1:
            raise ConfigError(
                f"shift={self.shift:g} on path='discrete', whose levels the chain says; leave "
                "shift at 1"
            )
        if self.chain.zero_snr and self.prediction == "noise":
            raise ConfigError(
                "prediction='noise' says nothing of the data where a chain with zero_snr ends; "
                "set prediction to 'v', or zero_snr to false"
            )

    def point(self, u_B: jax.Array) -> Point:
        """(B,) noise levels from (B,) uniform numbers in (0, 1); t as schedules have it."""
        if self.path == "edm":
            sigma = jnp.exp(self.mean + self.deviation * ndtri(u_B)) * self.shift
            return Point(jnp.log(sigma) / 4, jnp.ones_like(sigma), sigma)
        time = self._time(u_B)
        if self.chain is not None:
            index = jnp.minimum((time * self.chain.steps).astype(jnp.int32), self.chain.steps - 1)
            levels = self.chain.discrete().levels(np.arange(self.chain.steps))
            alpha, sigma = (jnp.asarray(level, time.dtype)[index] for level in levels)
            return Point(index.astype(time.dtype), alpha, sigma)
        if self.path == "flow":
            sigma = shifted(time, self.shift)
            return Point(1000 * sigma, 1 - sigma, sigma)
        angle = jnp.arctan2(self.shift * jnp.sin(jnp.pi / 2 * time), jnp.cos(jnp.pi / 2 * time))
        return Point(1000 * angle * 2 / jnp.pi, jnp.cos(angle), jnp.sin(angle))

    def within(self, u_B: jax.Array, part: tuple[float, float]) -> jax.Array:
        """Uniform numbers of a part of the times, which are as likely to each other as before.

        Args:
          u_B: (B,) in (0, 1), as for `point`.
          part: the least and the greatest time after the shift, in [0, 1].

        Raises:
          ConfigError: on path `edm`, whose noise has no greatest level.
        """
        if self.path == "edm":
            raise ConfigError(
                "objective.path=edm has no greatest level of noise, and a network of a part of the "
                "times is trained on its levels; set it to flow, or objective to null"
            )
        first, last = sorted(map(self._uniform, part))
        return first + u_B * (last - first)

    def schedule(self, steps: int) -> Schedule:
        """Noise levels for a sampler of a network that was trained so, in `steps` steps.

        On `cosine` they are even in time, from just under pure noise, where a noise prediction says
        something of the data.
        """
        if self.path == "flow":
            return flow(steps, shift=self.shift)
        if self.path == "edm":
            return edm(steps)
        if self.chain is not None:
            return self.chain.discrete().schedule(steps, "trailing")
        time = np.linspace(1, 0, steps + 1)
        time[0] = min(0.999, 1 - 0.25 / steps)
        angle = np.arctan2(self.shift * np.sin(np.pi / 2 * time), np.cos(np.pi / 2 * time))
        return Schedule(
            path="vp", t=1000 * angle * 2 / np.pi, alpha=np.cos(angle), sigma=np.sin(angle)
        )

    def _time(self, u_B: jax.Array) -> jax.Array:
        match self.density:
            case "uniform":
                return u_B
            case "logit-normal":
                return jax.nn.sigmoid(self.mean + self.deviation * ndtri(u_B))
            case "mode":
                return _mode(u_B, self.mode_scale, jnp.cos)

    def _uniform(self, time: float) -> float:
        """The uniform number of a time after the shift: the inverse of what `point` does."""
        if self.path == "flow":
            time = shifted(time, 1 / self.shift)
        elif self.path == "cosine":
            angle = math.pi / 2 * time
            angle = math.atan2(math.sin(angle), self.shift * math.cos(angle))
            time = 2 / math.pi * angle
        match self.density:
            case "uniform":
                return time
            case "logit-normal":
                if not 0 < time < 1:
                    return float(time >= 1)
                return NormalDist(self.mean, self.deviation).cdf(math.log(time / (1 - time)))
            case "mode":
                from scipy.optimize import root_scalar

                def above(u: float) -> float:
                    return _mode(u, self.mode_scale, math.cos) - time

                return float(root_scalar(above, bracket=(0.0, 1.0)).root)

    def weights(self, point: Point) -> jax.Array:
        """(B,) factors of the squared error of the prediction, finite at both ends of the path."""
        alpha = jnp.maximum(point.alpha, SMALLEST)
        sigma = jnp.maximum(point.sigma, SMALLEST)
        snr = (alpha / sigma) ** 2
        match self.weight:
            case "constant":
                return jnp.ones_like(sigma)
            case "min-snr":
                on_data = jnp.minimum(snr, self.gamma)
            case "sigmoid":
                on_data = snr * jax.nn.sigmoid(self.bias - jnp.log(snr))
            case "cosmap":
                density = 2 / (jnp.pi * (1 - 2 * sigma + 2 * sigma**2))
                on_data = density * ((alpha + sigma) / sigma) ** 2
            case "edm":
                on_data = preconditioning(sigma, self.sigma_data)[1] ** -2
        return on_data * self._data_error(alpha, sigma) ** 2

    def _data_error(self, alpha: jax.Array, sigma: jax.Array) -> Any:
        """The data's error for an error of 1 of the prediction."""
        match self.prediction:
            case "noise":
                return sigma / alpha
            case "data":
                return 1.0
            case "v":
                return sigma / (alpha**2 + sigma**2)
            case "flow":
                return sigma / (alpha + sigma)
            case "edm":
                return preconditioning(sigma, self.sigma_data)[1]

    def noised(self, data_BX: jax.Array, noise_BX: jax.Array, point: Point) -> jax.Array:
        """x_BX that the network sees: alpha data + sigma noise, float32."""
        return along(point.alpha, data_BX) * data_BX + along(point.sigma, data_BX) * noise_BX

    def losses(
        self, output_BX: jax.Array, data_BX: jax.Array, noise_BX: jax.Array, point: Point
    ) -> jax.Array:
        """(B,) float32: each row's weighted mean squared error over its elements.

        Args:
          output_BX: the network's output for `noised`, any floating dtype.
          data_BX: clean examples, float32.
          noise_BX: standard normal, float32.
          point: the rows' noise levels, from `point`.
        """
        wanted = target(self.prediction, data_BX, noise_BX, point, sigma_data=self.sigma_data)
        error = output_BX.astype(wanted.dtype) - wanted
        return self.weights(point) * jnp.mean(error**2, tuple(range(1, error.ndim)))


def _mode(u: Any, scale: float, cos: Callable[[Any], Any]) -> Any:
    """A time of a uniform number (Esser et al. 2024, eq. 20)."""
    return 1 - u - scale * (cos(math.pi / 2 * u) ** 2 - 1 + u)
