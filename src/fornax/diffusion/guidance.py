"""Guidance: networks with conditions, made into networks without.

A condition is a pytree of arrays whose rows go with the rows of x_BX. Guided networks run once, on
the rows of all conditions behind each other.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fornax.config.errors import ConfigError
from fornax.diffusion.predictions import Point, along
from fornax.diffusion.sampling import Network

__all__ = ["ConditionedNetwork", "check_guidance", "guided", "perpendicular"]

ConditionedNetwork = Callable[[jax.Array, Point, Any], jax.Array]


def check_guidance(name: str, scale: float | None) -> None:
    """Refuse a scale that says nothing.

    Raises:
      ConfigError: it is not None, and not from 0 to 100.
    """
    if scale is not None and not 0 <= scale <= 100:
        raise ConfigError(f"{name}={scale:g} must be from 0 to 100; 1 means no guidance")


def guided(
    network: ConditionedNetwork,
    condition: Any,
    empty: Any,
    scale: float | jax.Array,
    *,
    rescale: float = 0.0,
    norm_patch: int | None = None,
    interval: tuple[float, float] | None = None,
) -> Network:
    """Classifier-free guidance (Ho and Salimans 2022): empty + scale (conditioned - empty).

    Args:
      network: x_BX, a point and conditions to the output.
      condition: what to draw.
      empty: the condition dropped in training, or a negative one; of the same shapes.
      scale: () or (B,); 1 is the conditioned network.
      rescale: in [0, 1], the share of the output that is scaled to the conditioned output's
        standard deviation over a row (Lin et al. 2024, eq. 15 and 16).
      norm_patch: of images [B, H, W, C], the side of patches over whose places and channels the
        output keeps the conditioned output's length (Qwen-Image); None for no such scaling.
      interval: (low, high] of sigma / alpha outside of which nothing is guided
        (Kynkaanniemi et al. 2024); there the network runs on the condition alone.

    Raises:
      ConfigError: `rescale` or `interval` out of range.
    """
    if not 0 <= rescale <= 1:
        raise ConfigError(f"rescale={rescale:g}; it is a share, in [0, 1]")
    if interval is not None and not 0 <= interval[0] < interval[1]:
        raise ConfigError(f"interval={interval}; use 0 <= low < high, in units of sigma / alpha")

    def both(x_BX: jax.Array, point: Point, scale: jax.Array) -> jax.Array:
        with_, without = _outputs(network, x_BX, point, (condition, empty))
        found = without + along(scale.astype(with_.dtype), with_) * (with_ - without)
        if rescale:
            axes = tuple(range(1, x_BX.ndim))
            ratio = _deviation(with_, axes) / _deviation(found, axes)
            found = found * (rescale * ratio + (1 - rescale))
        if norm_patch is not None:
            wanted, length = _length(with_, norm_patch), _length(found, norm_patch)
            found = found * jnp.where(length > 0, wanted / jnp.where(length > 0, length, 1), 1)
        return found

    def run(x_BX: jax.Array, point: Point) -> jax.Array:
        factor = jnp.asarray(scale, jnp.float32)
        if interval is None:
            return both(x_BX, point, factor)
        low, high = interval
        within = (point.sigma > low * point.alpha) & (point.sigma <= high * point.alpha)
        if within.ndim:  # rows at different levels: a scale of 1 is the condition alone
            return both(x_BX, point, jnp.where(within, factor, 1))
        return jax.lax.cond(
            within,
            lambda x, at: both(x, at, factor),
            lambda x, at: _outputs(network, x, at, (condition,))[0],
            x_BX,
            point,
        )

    return run


def perpendicular(
    network: ConditionedNetwork,
    condition: Any,
    negative: Any,
    empty: Any,
    scale: float | jax.Array,
    negative_scale: float = 1.0,
) -> Network:
    """Perpendicular negative prompts (Armandpour et al. 2023).

    Of the negative's direction only the part perpendicular to the positive's is taken away, so a
    negative that overlaps the prompt does not undo it:
    empty + scale (p - negative_scale (n - p <n, p> / <p, p>)), p and n relative to empty.

    Args:
      network: as of `guided`.
      condition: what to draw.
      negative: what to avoid.
      empty: the condition dropped in training.
      scale: () or (B,).
      negative_scale: how much of the negative's part.
    """

    def run(x_BX: jax.Array, point: Point) -> jax.Array:
        with_, against, without = _outputs(network, x_BX, point, (condition, negative, empty))
        p, n = with_ - without, against - without
        axes = tuple(range(1, x_BX.ndim))
        length = jnp.sum(p * p, axes, keepdims=True)
        share = jnp.sum(p * n, axes, keepdims=True) / jnp.where(length > 0, length, 1)
        return without + along(jnp.asarray(scale, p.dtype), p) * (
            p - negative_scale * (n - share * p)
        )

    return run


def _outputs(
    network: ConditionedNetwork, x_BX: jax.Array, point: Point, conditions: tuple[Any, ...]
) -> list[jax.Array]:
    """The outputs under each condition, in one call."""
    count = len(conditions)

    def tiled(value: jax.Array) -> jax.Array:
        return jnp.concatenate([value] * count) if value.ndim else value

    joined = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *conditions)
    return jnp.split(network(tiled(x_BX), Point(*map(tiled, point)), joined), count)


def _length(x_BHWC: jax.Array, side: int) -> jax.Array:
    """The length of each patch at each of its places, [B, H, W, 1]."""
    B, H, W, C = x_BHWC.shape
    patches = x_BHWC.astype(jnp.float32).reshape(B, H // side, side, W // side, side, C)
    lengths = jnp.sqrt(jnp.sum(patches * patches, (2, 4, 5), keepdims=True))
    whole = jnp.broadcast_to(lengths, (*patches.shape[:-1], 1))
    return whole.reshape(B, H, W, 1).astype(x_BHWC.dtype)


def _deviation(x_BX: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    return jnp.std(x_BX, axes, ddof=1, keepdims=True)
