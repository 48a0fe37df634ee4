"""Packed weights by XLA alone, on any platform and over any mesh.

Legend: L layers, M rows, K inputs, N outputs.
"""

import jax
import jax.numpy as jnp
from jax import lax

from fornax.kernels._packed.formats import FORMATS, Parts, Precision, dequantize

__all__ = ["codes", "expert", "layout", "linear"]


def layout(given: Parts, precision: Precision) -> Parts:
    """Return the codes as they are, those of 4 bits two inputs to a byte, the first one lower."""
    if precision not in FORMATS or FORMATS[precision].bits != 4:
        return given
    padded = jnp.pad(given.values, ((0, 0), (0, given.values.shape[1] % 2), (0, 0)))
    return given._replace(values=padded[:, ::2] | (padded[:, 1::2] << 4))


def codes(parts: Parts, precision: Precision, inputs: int) -> Parts:
    """Undo `layout`: return values [L, K, N]."""
    if precision not in FORMATS or FORMATS[precision].bits != 4:
        return parts
    L, _, N = parts.values.shape
    halves = jnp.stack([parts.values & 15, parts.values >> 4], axis=2)
    return parts._replace(values=halves.reshape(L, -1, N)[:, :inputs])


def linear(
    x_MK: jax.Array, parts: Parts, layer: jax.Array, precision: Precision, group: int | None
) -> jax.Array:
    """Return y [M, N] in the dtype of x; weights of few bits are widened to float32 first."""
    one = jax.tree.map(lambda each: lax.dynamic_index_in_dim(each, layer), parts)
    if precision not in FORMATS:
        w_KN = one.values[0]
        y_MN = jnp.matmul(x_MK.astype(w_KN.dtype), w_KN, preferred_element_type=jnp.float32)
        return y_MN.astype(x_MK.dtype)
    w_KN = dequantize(codes(one, precision, x_MK.shape[1]), precision, group)[0]
    rounded = x_MK.astype(FORMATS[precision].rows)
    y_MN = jnp.matmul(rounded.astype(jnp.float32), w_KN, precision=lax.Precision.HIGHEST)
    return y_MN.astype(x_MK.dtype)


def expert(
    parts: Parts,
    layer: jax.Array,
    index: jax.Array,
    inputs: int,
    precision: Precision,
    group: int | None,
) -> jax.Array:
    """Return one matrix of [L, E, ...], widened: float32 [K, N]."""

    def pick(each: jax.Array) -> jax.Array:
        start = (layer, index, *[jnp.int32(0)] * (each.ndim - 2))
        return lax.dynamic_slice(each, start, (1, 1, *each.shape[2:]))[0]

    return dequantize(codes(jax.tree.map(pick, parts), precision, inputs), precision, group)[0]
