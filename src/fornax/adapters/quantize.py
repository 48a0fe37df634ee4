"""Quantized weights, block by block: nf4, int8 and int4.

Each block of inputs of an output shares a scale. The codes keep the kernel's axes, two of them to a
byte for four bits, so that a kernel's sharding is its codes'.

nf4 are the quantiles of a normal distribution, zero among them (Dettmers et al. 2023, appendix E).
"""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from fornax.adapters.config import Quantization
from fornax.config.errors import ConfigError
from fornax.quant.rounding import rounded_to

__all__ = ["NF4", "Blocks", "block_size", "dequantize", "quantize", "quantize_array"]

NF4 = np.array(
    [
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ],
    np.float32,
)
"""The sixteen values of nf4, ascending."""

_LARGEST = {"nf4": 1.0, "int8": 127.0, "int4": 7.0}


@dataclass(frozen=True)
class Blocks:
    """How a kernel is held."""

    format: Literal["nf4", "int8", "int4"]
    axis: int
    """Which axis is cut into blocks, counted from the last one."""
    size: int
    """Entries of a block."""
    dtype: str
    """Dtype of the kernel that it stands for."""
    scale: str = "bfloat16"
    """Dtype of scales."""
    product: str = "float32"
    """Dtype that a code times its scale is rounded to."""


def block_size(width: int, most: int, bits: Quantization, where: str) -> int:
    """The largest block that divides an axis.

    Args:
        width: of the axis.
        most: the largest block allowed.
        bits: format of the codes.
        where: the kernel's name, for errors.

    Raises:
        ConfigError: for an odd axis whose codes of four bits cannot be paired.
    """
    if bits != "int8" and width % 2:
        raise ConfigError(
            f"{where} has {width} inputs, an odd number: codes of four bits come in pairs. Use "
            "int8, or leave this module out of the targets"
        )
    return max(size for size in range(1, min(most, width) + 1) if width % size == 0)


def quantize(kernel: jax.Array, blocks: Blocks) -> tuple[jax.Array, jax.Array]:
    """A kernel's codes, and the scales of its blocks.

    The scales are rounded before the codes are chosen, so that rounding them costs nothing.
    """
    axis = kernel.ndim + blocks.axis
    parts = _cut(kernel.astype(jnp.float32), axis, blocks.size)
    largest = jnp.max(jnp.abs(parts), axis=axis + 1) / _LARGEST[blocks.format]
    scale = largest.astype(blocks.scale)
    divisor = jnp.expand_dims(scale.astype(jnp.float32), axis + 1)
    unit = jnp.where(divisor > 0, parts / jnp.where(divisor > 0, divisor, 1), 0)
    unit = unit.reshape(kernel.shape)
    if blocks.format == "int8":
        return jnp.clip(jnp.round(unit), -127, 127).astype(jnp.int8), scale
    if blocks.format == "int4":
        codes = (jnp.clip(jnp.round(unit), -7, 7) + 8).astype(jnp.uint8)
    else:
        middles = (NF4[1:] + NF4[:-1]) / 2
        codes = jnp.searchsorted(middles, unit, method="compare_all").astype(jnp.uint8)
    pairs = _cut(codes, axis, 2)
    low, high = (jax.lax.index_in_dim(pairs, i, axis + 1, keepdims=False) for i in (0, 1))
    return low | (high << 4), scale


quantize_array = jax.jit(quantize, static_argnums=1)
"""`quantize` as one compiled program."""


def dequantize(codes: jax.Array, scale: jax.Array, blocks: Blocks) -> jax.Array:
    """The kernel that codes and scales stand for, in its own dtype."""
    axis = codes.ndim + blocks.axis
    if blocks.format == "int8":
        unit = codes.astype(jnp.float32)
    else:
        pairs = jnp.stack([codes & 15, codes >> 4], axis=axis + 1)
        codes = pairs.reshape(_with(codes.shape, axis, 2 * codes.shape[axis]))
        unit = jnp.asarray(NF4)[codes] if blocks.format == "nf4" else codes.astype(jnp.float32) - 8
    parts = _cut(unit, axis, blocks.size)
    whole = parts * jnp.expand_dims(scale.astype(jnp.float32), axis + 1)
    whole = rounded_to(whole, np.dtype(blocks.product))
    return whole.reshape(unit.shape).astype(blocks.dtype)


def _cut(x: jax.Array, axis: int, size: int) -> jax.Array:
    """[..., n, ...] to [..., n / size, size, ...]."""
    return x.reshape(*x.shape[:axis], x.shape[axis] // size, size, *x.shape[axis + 1 :])


def _with(shape: tuple[int, ...], axis: int, width: int) -> tuple[object, ...]:
    return (*shape[:axis], width, *shape[axis + 1 :])
