"""Learning-rate schedules: what the config says, composed from Optax's own pieces."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from fornax.config.errors import ConfigError

__all__ = [
    "WSD",
    "Constant",
    "Cosine",
    "Linear",
    "Piecewise",
    "Schedule",
    "ScheduleFn",
    "build_schedule",
]

ScheduleFn = Callable[[Any], Any]
"""Step number (int or int32 scalar) to learning rate (float32 scalar)."""


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise ConfigError(message)


def _check_warmup(warmup_steps: int) -> None:
    _require(warmup_steps >= 0, f"warmup_steps={warmup_steps} is negative; use 0 for no warmup")


def _check_fraction(name: str, value: float) -> None:
    _require(
        0.0 <= value <= 1.0,
        f"{name}={value} is not a fraction of the peak learning rate; use 0 to 1",
    )


@dataclass(frozen=True, kw_only=True)
class Constant:
    """The peak learning rate, after a linear warmup."""

    type: Literal["constant"] = "constant"
    warmup_steps: int = 0
    """Updates over which the rate rises linearly from 0."""

    def __post_init__(self) -> None:
        _check_warmup(self.warmup_steps)


@dataclass(frozen=True, kw_only=True)
class Linear:
    """Warmup, then a straight line down to `end_factor` of the peak at the last step."""

    type: Literal["linear"] = "linear"
    warmup_steps: int = 0
    """Updates over which the rate rises linearly from 0."""
    end_factor: float = 0.0
    """Final rate as a fraction of the peak."""

    def __post_init__(self) -> None:
        _check_warmup(self.warmup_steps)
        _check_fraction("end_factor", self.end_factor)


@dataclass(frozen=True, kw_only=True)
class Cosine:
    """Warmup, then half a cosine down to `end_factor` of the peak at the last step."""

    type: Literal["cosine"] = "cosine"
    warmup_steps: int = 0
    """Updates over which the rate rises linearly from 0."""
    end_factor: float = 0.1
    """Final rate as a fraction of the peak."""

    def __post_init__(self) -> None:
        _check_warmup(self.warmup_steps)
        _check_fraction("end_factor", self.end_factor)


@dataclass(frozen=True, kw_only=True)
class WSD:
    """Warmup, stable, decay (Hu et al. 2024, MiniCPM): most of the run at the peak."""

    type: Literal["wsd"] = "wsd"
    warmup_steps: int = 0
    """Updates over which the rate rises linearly from 0."""
    decay_steps: int | None = None
    """Length of the final decay; None takes the last fifth of the run."""
    end_factor: float = 0.0
    """Final rate as a fraction of the peak."""
    decay: Literal["linear", "cosine", "sqrt"] = "linear"
    """Shape of the decay; `sqrt` is 1 - sqrt(progress) (Haegele et al. 2024)."""

    def __post_init__(self) -> None:
        _check_warmup(self.warmup_steps)
        _check_fraction("end_factor", self.end_factor)
        _require(
            self.decay_steps is None or self.decay_steps > 0,
            f"decay_steps={self.decay_steps} leaves no decay; use a positive number or null",
        )


@dataclass(frozen=True, kw_only=True)
class Piecewise:
    """Factors of the peak that hold between given steps, or lines drawn between them."""

    type: Literal["piecewise"] = "piecewise"
    warmup_steps: int = 0
    """Updates over which the rate rises linearly from 0."""
    boundaries: tuple[int, ...] = ()
    """Steps, counted from the start of training, at which the next factor takes over."""
    factors: tuple[float, ...] = (1.0,)
    """Fractions of the peak: one more than there are boundaries."""
    interpolate: Literal["constant", "linear"] = "constant"
    """`linear` reaches factor i + 1 at boundary i on a straight line from the one before."""

    def __post_init__(self) -> None:
        _check_warmup(self.warmup_steps)
        _require(
            len(self.factors) == len(self.boundaries) + 1,
            f"{len(self.factors)} factors do not fit {len(self.boundaries)} boundaries; give one "
            "factor more than boundaries",
        )
        edges = (self.warmup_steps, *self.boundaries)
        _require(
            all(a < b for a, b in itertools.pairwise(edges)),
            f"boundaries={list(self.boundaries)} must rise, and start after "
            f"warmup_steps={self.warmup_steps}",
        )
        _require(
            all(factor >= 0 for factor in self.factors),
            f"factors={list(self.factors)} has a negative one; use 0 or more",
        )


Schedule = Constant | Linear | Cosine | WSD | Piecewise
"""What the learning rate does over a run."""


def build_schedule(config: Schedule, *, peak: float, total_steps: int) -> ScheduleFn:
    """The Optax schedule of `config`.

    Args:
      config: the shape of the schedule.
      peak: learning rate at the end of the warmup.
      total_steps: optimizer updates in the whole run.

    Returns:
      A function of the number of updates made so far, starting at 0.

    Raises:
      ConfigError: when the parts are longer than the run.
    """
    left = total_steps - config.warmup_steps
    _require(
        left > 0,
        f"warmup_steps={config.warmup_steps} fills the whole run of {total_steps} steps; use "
        f"fewer than {total_steps}",
    )
    after = _after_warmup(config, peak, left)
    if config.warmup_steps == 0:
        return after
    warmup = optax.linear_schedule(0.0, peak, config.warmup_steps)
    return optax.join_schedules([warmup, after], [config.warmup_steps])


def _after_warmup(config: Schedule, peak: float, steps: int) -> ScheduleFn:
    match config:
        case Constant():
            return optax.constant_schedule(peak)
        case Linear():
            return optax.linear_schedule(peak, peak * config.end_factor, steps)
        case Cosine():
            return optax.cosine_decay_schedule(peak, steps, alpha=config.end_factor)
        case WSD():
            return _wsd(config, peak, steps)
        case Piecewise():
            return _piecewise(config, peak)


def _wsd(config: WSD, peak: float, steps: int) -> ScheduleFn:
    decay_steps = config.decay_steps or max(1, (steps + config.warmup_steps) // 5)
    _require(
        decay_steps <= steps,
        f"warmup_steps={config.warmup_steps} and decay_steps={decay_steps} do not fit into "
        f"{steps + config.warmup_steps} steps; shorten one of them",
    )
    decay = {
        "linear": lambda: optax.linear_schedule(peak, peak * config.end_factor, decay_steps),
        "cosine": lambda: optax.cosine_decay_schedule(peak, decay_steps, alpha=config.end_factor),
        "sqrt": lambda: _sqrt_decay(peak, peak * config.end_factor, decay_steps),
    }[config.decay]()
    stable = steps - decay_steps
    return optax.join_schedules([optax.constant_schedule(peak), decay], [stable])


def _sqrt_decay(peak: float, end: float, steps: int) -> ScheduleFn:
    def schedule(count: jax.typing.ArrayLike) -> jax.Array:
        progress = jnp.clip(jnp.asarray(count, jnp.float32) / steps, 0.0, 1.0)
        return peak + (end - peak) * jnp.sqrt(progress)

    return schedule


def _piecewise(config: Piecewise, peak: float) -> ScheduleFn:
    edges = [boundary - config.warmup_steps for boundary in config.boundaries]
    levels = [peak * factor for factor in config.factors]
    if config.interpolate == "constant":
        return optax.join_schedules([optax.constant_schedule(level) for level in levels], edges)
    starts = [0, *edges]
    lines = [
        optax.linear_schedule(levels[i], levels[i + 1], starts[i + 1] - starts[i])
        for i in range(len(edges))
    ]
    return optax.join_schedules([*lines, optax.constant_schedule(levels[-1])], edges)
