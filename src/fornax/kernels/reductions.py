"""Reductions over a vocabulary, arranged so that processors with vector units are quick at them.

A row of V values is seen as G x L: reducing over G first keeps L sums side by side, in an order
that does not depend on how many rows there are, so that a row's result never does either.

Legend: M samples, V vocabulary, G groups, L lanes.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

from fornax.kernels.registry import current_platform

__all__ = ["maximum", "pick", "prefix", "split", "total"]

LANES = 256


def split(x_MV: jax.Array, fill: float) -> jax.Array:
    """To [M, G, L], filled up at the end."""
    vocab_size = x_MV.shape[-1]
    groups = math.ceil(vocab_size / LANES)
    padding = groups * LANES - vocab_size
    x_MV = jnp.pad(x_MV, ((0, 0), (0, padding)), constant_values=fill)
    return x_MV.reshape(-1, groups, LANES)


def maximum(x_MGL: jax.Array) -> jax.Array:
    """[M]; on CPU XLA may leave NaN out."""
    return jnp.max(jnp.max(x_MGL, axis=1), axis=-1)


def total(x_MGL: jax.Array) -> jax.Array:
    """[M]."""
    return jnp.sum(jnp.sum(x_MGL, axis=1), axis=-1)


def pick(weights_MGL: jax.Array, uniforms_M2: jax.Array) -> jax.Array:
    """Draw an index of each row with probability proportional to its weight.

    First a lane, by the lanes' sums, then a member of it, each with random bits of its own.

    Args:
        weights_MGL: float32, at least 0, some above.
        uniforms_M2: float32 in [0, 1).

    Returns:
        int32 [M]; never an index of weight 0.
    """
    lane_M = _draw(jnp.sum(weights_MGL, axis=1), uniforms_M2[:, 0])
    column_MG = jnp.take_along_axis(weights_MGL, lane_M[:, None, None], axis=2)[:, :, 0]
    group_M = _draw(column_MG, uniforms_M2[:, 1])
    return group_M * weights_MGL.shape[2] + lane_M


def _draw(weights_MN: jax.Array, uniform_M: jax.Array) -> jax.Array:
    cumulative_MN = prefix(weights_MN)
    target_M1 = (uniform_M * cumulative_MN[:, -1])[:, None]
    # Rounding may let a sum grow or shrink where no weight is: only weights above 0 count.
    hit_MN = (cumulative_MN > target_M1) & (weights_MN > 0)
    likely_M = jnp.argmax(weights_MN, axis=-1)
    first_M = jnp.argmax(hit_MN, axis=-1)
    return jnp.where(jnp.any(hit_MN, axis=-1), first_M, likely_M).astype(jnp.int32)


def prefix(x_MN: jax.Array) -> jax.Array:
    """Running sums along the second axis."""
    if current_platform() != "cpu":
        return jnp.cumsum(x_MN, axis=1)

    def add(index: jax.Array, sums_MN: jax.Array) -> jax.Array:
        return sums_MN.at[:, index].add(sums_MN[:, index - 1])

    # On CPU quicker than a scan, and ten times quicker to compile.
    return lax.fori_loop(1, x_MN.shape[1], add, x_MN)
