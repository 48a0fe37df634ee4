"""Random bits for stochastic rounding: a hash of each element's index.

They depend on no sharding, and XLA computes them where they are used, without an array of them.
"""

import jax
import jax.numpy as jnp

__all__ = ["index_noise"]


def index_noise(shape: tuple[int, ...], number: jax.Array, stream: int) -> jax.Array:
    """Random bits of each element of an array, uint32.

    Args:
      shape: of the array.
      number: integer scalar; other numbers give other bits.
      stream: which array that is rounded by this number it is.
    """
    return _hash(_hash(_index(shape) ^ _hash(number.astype(jnp.uint32))) + jnp.uint32(stream))


def _index(shape: tuple[int, ...]) -> jax.Array:
    """The row-major index of each element, modulo 2^32."""
    index, stride = jnp.zeros(shape, jnp.uint32), 1
    for dim in reversed(range(len(shape))):
        place = jax.lax.broadcasted_iota(jnp.uint32, shape, dim)
        index += place * jnp.uint32(stride % 2**32)
        stride *= shape[dim]
    return index


def _hash(x: jax.Array) -> jax.Array:
    """The 32-bit finalizer of MurmurHash3 (Appleby 2011), of x + 1 so that zero is not a fixed
    point."""
    x = x + jnp.uint32(1)
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
