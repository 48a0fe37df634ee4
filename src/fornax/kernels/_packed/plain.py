"""Packed weights by XLA alone, on any platform and over any mesh.

Legend: L layers, M rows, K inputs, N outputs, G groups of 64 inputs.
"""

import jax
import jax.numpy as jnp
from jax import lax

__all__ = ["GROUP", "layout", "linear", "quantize", "unpack"]

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


def layout(w_LKN: jax.Array, precision: str) -> tuple[jax.Array, jax.Array | None]:
    """Return the values [L, K, N], and for int8 the scales [L, G, N]."""
    if precision == "int8":
        return quantize(w_LKN)
    return w_LKN.astype(precision), None


def linear(
    x_MK: jax.Array, values: jax.Array, scales: jax.Array | None, layer: jax.Array, outputs: int
) -> jax.Array:
    """Return y [M, N] in the dtype of x; int8 weights are widened first."""
    del outputs  # the values are not padded
    w = lax.dynamic_index_in_dim(values, layer, keepdims=False)
    if scales is not None:
        scale = lax.dynamic_index_in_dim(scales, layer, keepdims=False)
        w = _widen(w[None], scale[None])[0].astype(x_MK.dtype)
    y = jnp.matmul(x_MK.astype(w.dtype), w, preferred_element_type=jnp.float32)
    return y.astype(x_MK.dtype)


def unpack(values: jax.Array, scales: jax.Array | None, inputs: int, outputs: int) -> jax.Array:
    """Return the values as float32 [L, K, N]."""
    del outputs
    return values.astype(jnp.float32) if scales is None else _widen(values, scales)[:, :inputs]


def _widen(values: jax.Array, scales: jax.Array) -> jax.Array:
    wide = jnp.repeat(scales, GROUP, axis=1)[:, : values.shape[1]]
    return values.astype(jnp.float32) * wide
