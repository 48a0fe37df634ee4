"""Averages of the parameters over training: with a warm-up, or of lengths chosen afterwards.

These are Optax transformations, the last of a chain, that leave the updates as they are.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fornax.config.errors import ConfigError

__all__ = ["Averages", "average_with", "power_decay", "power_exponent", "reconstruct", "warmed_up"]

Decay = Callable[[jax.Array], jax.Array]
"""The decay at an update, counted from 0, float32."""


class Averages(NamedTuple):
    """State of `average_with`: updates so far, and one float32 average for each decay."""

    count: jax.Array
    averages: tuple[optax.Params, ...]


def warmed_up(decay: float) -> Decay:
    """min(decay, (1 + n) / (10 + n)): a short run's average is not its random start."""
    return lambda count: jnp.minimum(decay, (1.0 + count) / (10.0 + count))


def power_exponent(relative_width: float) -> float:
    """The exponent of a power-function average whose width is a share of the run.

    Karras et al. 2024, eq. 3: the standard deviation of t^exponent on (0, 1) is
    sqrt((g + 1) / ((g + 2)^2 (g + 3))).

    Args:
      relative_width: in (0, 0.28); 0.05 and 0.1 are their two.

    Raises:
      ConfigError: no exponent has this width.
    """
    # The cubic of g: width^2 (g + 2)^2 (g + 3) = g + 1.
    inverse = relative_width**-2 if relative_width > 0 else np.inf
    roots = np.roots([1, 7, 16 - inverse, 12 - inverse]) if np.isfinite(inverse) else np.array([])
    real = roots[np.abs(roots.imag) < 1e-9].real
    if not real.size or real.max() <= 0:
        raise ConfigError(
            f"relative_width={relative_width:g}; a power function's width lies in (0, 0.28) of the "
            "run: use 0.05 or 0.1"
        )
    return float(real.max())


def power_decay(exponent: float) -> Decay:
    """(1 - 1/n)^(exponent + 1) at the n-th update: weights proportional to t^exponent."""
    return lambda count: (count / (count + 1.0)) ** (exponent + 1)


def average_with(*decays: Decay) -> optax.GradientTransformation:
    """Keep a running average of the parameters, as they are after each update, for each decay.

    average <- d average + (1 - d) params, in float32, d the decay at this update. The parameters of
    the start count until the first decay of 0.
    """

    def init(params: optax.Params) -> Averages:
        copies = [jax.tree.map(lambda p: jnp.array(p, jnp.float32), params) for _ in decays]
        return Averages(jnp.zeros([], jnp.int32), tuple(copies))

    def update(
        updates: optax.Updates, state: Averages, params: optax.Params | None = None
    ) -> tuple[optax.Updates, Averages]:
        after = optax.apply_updates(cast("optax.Params", params), updates)
        averages = []
        for decay, average in zip(decays, state.averages, strict=True):
            share = decay(state.count.astype(jnp.float32))
            averages.append(
                jax.tree.map(
                    lambda a, p, d=share: d * a + (1 - d) * p.astype(jnp.float32), average, after
                )
            )
        count = cast("jax.Array", optax.safe_increment(state.count))
        return updates, Averages(count, tuple(averages))

    return optax.GradientTransformation(init, cast("optax.TransformUpdateFn", update))


def reconstruct(
    snapshots: Sequence[optax.Params],
    steps: Sequence[int],
    exponents: Sequence[float],
    step: int,
    exponent: float,
) -> optax.Params:
    """The average of any length, after the run, from snapshots of a few (Karras et al. 2024).

    The wanted average's weights over training are fitted, in least squares, by those of the
    snapshots.

    Args:
      snapshots: averages by `power_decay`, trees of arrays, as they were at `steps`.
      steps: updates before each snapshot.
      exponents: of each snapshot.
      step: the update at which the wanted average ends.
      exponent: of the wanted average; see `power_exponent`.

    Returns:
      A tree of float32 arrays.

    Raises:
      ConfigError: no snapshot, or lengths that differ.
    """
    if not snapshots or not len(snapshots) == len(steps) == len(exponents):
        raise ConfigError(
            f"{len(snapshots)} snapshots, {len(steps)} steps, {len(exponents)} exponents; give one "
            "of each for every snapshot, and at least one"
        )
    t, g = np.asarray(steps, float), np.asarray(exponents, float)
    gram = _inner(t[:, None], g[:, None], t[None], g[None])
    shares = np.linalg.lstsq(gram, _inner(t, g, float(step), exponent), rcond=None)[0]
    return jax.tree.map(
        lambda *leaves: np.asarray(
            sum(np.asarray(a, np.float64) * s for a, s in zip(leaves, shares, strict=True)),
            np.float32,
        ),
        *snapshots,
    )


def _inner(
    t1: np.ndarray, g1: np.ndarray, t2: np.ndarray | float, g2: np.ndarray | float
) -> np.ndarray:
    """Integral of the product of two profiles (g + 1) s^g / t^(g + 1) on (0, t)."""
    low = np.minimum(t1, t2)
    return (
        (g1 + 1) * (g2 + 1) / (g1 + g2 + 1) * (low / t1) ** g1 * (low / t2) ** g2 * low / (t1 * t2)
    )
