"""Symmetric 8-bit integers with one scale for every 64 inputs of an output.

Legend: L layers, K inputs, N outputs, G groups of 64 inputs (the last one may be shorter).
"""

import jax
import jax.numpy as jnp

__all__ = ["GROUP", "quantize"]

GROUP = 64
"""Inputs that share a scale; the native kernel has the same number."""


def quantize(w_LKN: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return int8 values [L, K, N] and float32 scales [L, G, N]: w is about value * scale."""
    L, K, N = w_LKN.shape
    padded = jnp.pad(w_LKN.astype(jnp.float32), ((0, 0), (0, -K % GROUP), (0, 0)))
    groups = padded.reshape(L, -1, GROUP, N)
    scales = jnp.max(jnp.abs(groups), axis=2) / 127
    inverse = jnp.where(scales == 0, 0, 1 / jnp.where(scales == 0, 1, scales))
    values = jnp.round(groups * inverse[:, :, None]).astype(jnp.int8)
    return values.reshape(L, -1, N)[:, :K], scales
