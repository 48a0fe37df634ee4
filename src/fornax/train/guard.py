"""Which steps to leave out: gradients that are not finite, or far outside what they lately were.

The memory of recent gradient norms is part of the train state, so that a resumed run decides as
the uninterrupted one does.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from fornax.config.errors import ConfigError

__all__ = ["GuardState", "SkipConfig", "judge", "start_guard"]


@dataclass(frozen=True, kw_only=True)
class SkipConfig:
    """Steps whose update is left out. The data, the step number and the random keys move on;
    parameters and optimizer state, its schedule included, stay as they were."""

    outlier_factor: float | None = None
    """Skip when the gradient norm exceeds this multiple of the median of recent norms; null skips
    only gradients or losses that are not finite."""
    window: int = 64
    """How many recent norms the median is taken over. Outliers enter it too, so that a lasting
    change of scale is accepted after half a window."""
    warmup: int = 16
    """Norms seen before any counts as an outlier."""
    max_consecutive: int = 20
    """Skipped steps in a row after which the run stops with an error."""

    def __post_init__(self) -> None:
        """Check the numbers."""
        if self.outlier_factor is not None and self.outlier_factor <= 1:
            raise ConfigError(
                f"outlier_factor={self.outlier_factor} must be above 1, or null for no limit"
            )
        if self.window < 1 or self.max_consecutive < 1:
            raise ConfigError("window and max_consecutive must be 1 or more")
        if not 1 <= self.warmup <= self.window:
            raise ConfigError(
                f"warmup={self.warmup} must lie between 1 and window={self.window}: no more norms "
                "are remembered"
            )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GuardState:
    """Recent gradient norms."""

    norms: jax.Array
    """float32 [window]: a ring of the latest finite norms."""
    seen: jax.Array
    """int32 scalar: how many finite norms there were so far."""


def start_guard(config: SkipConfig) -> GuardState:
    """A guard that has seen nothing."""
    return GuardState(norms=jnp.zeros((config.window,), jnp.float32), seen=jnp.zeros((), jnp.int32))


def judge(
    config: SkipConfig, guard: GuardState, *, loss: jax.Array, norm: jax.Array, weight: jax.Array
) -> tuple[jax.Array, GuardState]:
    """Decide on one step.

    Args:
      config: the limits.
      guard: norms of earlier steps.
      loss: float32 scalar, the mean loss.
      norm: float32 scalar, the global gradient norm before clipping.
      weight: float32 scalar, the sum of weights; a batch without any has nothing to teach.

    Returns:
      A bool scalar, whether to make the update, and the guard with `norm` remembered.
    """
    finite = jnp.isfinite(loss) & jnp.isfinite(norm) & (weight > 0)
    accept = finite
    if config.outlier_factor is not None:
        filled = jnp.minimum(guard.seen, config.window)
        limit = config.outlier_factor * _median(guard.norms, filled)
        accept &= (guard.seen < config.warmup) | (norm <= limit)
    place = guard.seen % config.window
    norms = guard.norms.at[place].set(jnp.where(finite, norm, guard.norms[place]))
    return accept, GuardState(norms=norms, seen=guard.seen + finite.astype(jnp.int32))


def _median(ring: jax.Array, filled: jax.Array) -> jax.Array:
    """The upper median of the first `filled` places."""
    inside = jnp.arange(ring.shape[0]) < filled
    return jnp.sort(jnp.where(inside, ring, jnp.inf))[jnp.maximum(filled, 1) // 2]
