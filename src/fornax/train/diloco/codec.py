"""Parameter changes as bytes: float32, bfloat16, int8 and 4-bit E3M0, in blocks of 128 values.

Shapes: N values, a multiple of `BLOCK`; R rows of one block each; W bytes of a row.

A row is self-contained: its values, then, for int8 and e3m0, their scale as a float32. With s the
scale of a block and x one of its values, decoding gives y with

    float32   y = x
    bfloat16  |y - x| <= 2^-8 |x|
    int8      |y - x| <= s / 2                 s = max |x| / 127
    e3m0      |y - x| <= max(|x| / 3, s / 128)   s = max |x|

E3M0 has a sign, three bits of exponent and none of mantissa: 0 and the powers of two from 2^-6 s to
s (the format of Douillard et al. 2025, arXiv 2501.18512). Values are rounded to the nearest.
"""

from typing import Literal, get_args

import jax
import jax.numpy as jnp

__all__ = ["BLOCK", "ExchangeDtype", "decode", "encode", "row_bytes"]

ExchangeDtype = Literal["float32", "bfloat16", "int8", "e3m0"]

BLOCK = 128
"""Values that share a scale."""

_SCALE_BYTES = 4
_LEAST = 6
"""2^-6 is the smallest magnitude of E3M0 beside 0, where the largest is 1."""


def row_bytes(dtype: ExchangeDtype) -> int:
    """W: bytes of one block."""
    if dtype not in get_args(ExchangeDtype):
        raise ValueError(f"{dtype} is none of {get_args(ExchangeDtype)}")
    values = {"float32": 4 * BLOCK, "bfloat16": 2 * BLOCK, "int8": BLOCK, "e3m0": BLOCK // 2}
    return values[dtype] + (_SCALE_BYTES if dtype in ("int8", "e3m0") else 0)


def encode(values_N: jax.Array, dtype: ExchangeDtype) -> jax.Array:
    """Float32 values [N] as uint8 [R, W]. A block with a value that is not finite decodes to NaN or
    infinities."""
    x_RB = values_N.reshape(-1, BLOCK)
    if dtype == "float32":
        return _bytes(x_RB)
    if dtype == "bfloat16":
        return _bytes(x_RB.astype(jnp.bfloat16))
    largest_R1 = jnp.max(jnp.abs(x_RB), axis=1, keepdims=True)
    if dtype == "int8":
        scale_R1 = largest_R1 / 127
        code_RB = _bytes(jnp.round(_divided(x_RB, scale_R1)).astype(jnp.int8)[..., None])
    else:
        scale_R1 = largest_R1
        code_RB = _packed(_exponents(_divided(x_RB, scale_R1)))
    return jnp.concatenate([code_RB, _bytes(scale_R1)], axis=1)


def decode(rows_RW: jax.Array, dtype: ExchangeDtype) -> jax.Array:
    """uint8 [..., R, W] to the float32 values [..., N] that it stands for."""
    if dtype == "float32":
        x_RB = _numbers(rows_RW, jnp.float32)
    elif dtype == "bfloat16":
        x_RB = _numbers(rows_RW, jnp.bfloat16).astype(jnp.float32)
    else:
        code, scale = rows_RW[..., :-_SCALE_BYTES], rows_RW[..., -_SCALE_BYTES:]
        scale_R1 = _numbers(scale, jnp.float32)
        if dtype == "int8":
            x_RB = jax.lax.bitcast_convert_type(code, jnp.int8).astype(jnp.float32) * scale_R1
        else:
            x_RB = _powers(_unpacked(code)) * scale_R1
    return x_RB.reshape(*x_RB.shape[:-2], -1)


def _divided(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x / jnp.where(scale == 0, 1, scale)


def _bytes(x: jax.Array) -> jax.Array:
    """The bytes of the numbers in the last dimension, in its place."""
    return jax.lax.bitcast_convert_type(x, jnp.uint8).reshape(*x.shape[:1], -1)


def _numbers(rows: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    size = jnp.dtype(dtype).itemsize
    return jax.lax.bitcast_convert_type(rows.reshape(*rows.shape[:-1], -1, size), dtype)


def _exponents(x: jax.Array) -> jax.Array:
    """4-bit codes of values in [-1, 1]: 8 for the sign, plus 0 for 0 or e + 7 for 2^e."""
    size = jnp.abs(x)
    limits = jnp.array([0.5 * 2.0**-_LEAST, *(1.5 * 2.0**e for e in range(-_LEAST, 0))])
    code = jnp.sum(size[..., None] > limits, axis=-1, dtype=jnp.uint8)
    return code | jnp.where(x < 0, jnp.uint8(8), jnp.uint8(0))


def _powers(code: jax.Array) -> jax.Array:
    magnitudes = jnp.array([0.0, *(2.0**e for e in range(-_LEAST, 1))], jnp.float32)
    return magnitudes[code & 7] * jnp.where(code & 8, -1.0, 1.0)


def _packed(code_RB: jax.Array) -> jax.Array:
    """Two codes a byte: the first half of a block in the low four bits."""
    half = code_RB.shape[-1] // 2
    return code_RB[..., :half] | (code_RB[..., half:] << 4)


def _unpacked(code: jax.Array) -> jax.Array:
    return jnp.concatenate([code & 15, code >> 4], axis=-1)
