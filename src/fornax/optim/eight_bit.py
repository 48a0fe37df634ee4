"""AdamW whose moments are kept in 8 bits: codes of a dynamic map, with a scale for each block.

Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization" (arXiv 2110.02861); the codes
are those of bitsandbytes' dynamic map. Optax 0.2.8 has no such optimizer.

Seven decades of a value x in (0, 1] have n codes each, twice as many in each as in the one below:
code i of decade d stands for 10^(d - 6) (0.1 + 0.9 (i + 1/2) / n), and 1 and 0 have codes of their
own. With n = 2^d (a sign takes half of the codes) or 2^(d + 1), the number n + i, counted from
the code of zero, says both: its leading bit is the decade. So both ways are arithmetic, without a
table, whose look-ups would keep a CPU from its vector units and are slow on a TPU.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fornax.optim.transforms import increment, transformation
from fornax.optim.tree import at_paths, flatten
from fornax.optim.views import View

__all__ = ["Adam8bitState", "Blocks", "block_axis", "dequantize", "quantize", "scale_by_adam8bit"]

_BLOCK = 64
_LEAST_SIZE = 4096
_DECADES = 7
_ZERO = 127
"""Code of zero where values have signs; 0 where they have none."""


class Blocks(NamedTuple):
    """An array in 8 bits."""

    codes: jax.Array
    """uint8, of the array's shape."""
    scales: jax.Array
    """float32, of the array's shape with one axis divided by the block: the largest magnitudes."""


class Adam8bitState(NamedTuple):
    """State of `scale_by_adam8bit`: updates made, and both moments, keyed as the parameters are.

    A moment is `Blocks` where `block_axis` finds blocks, else a float32 array.
    """

    count: jax.Array
    mu: optax.Params
    nu: optax.Params


def block_axis(view: View) -> int | None:
    """The axis of a parameter along which blocks of 64 lie; None where moments are float32.

    That is for embeddings, output heads, norms and other vectors, for matrices of fewer than 4,096
    elements (as bitsandbytes has it), and for those whose inputs 64 does not divide.

    Blocks lie along the last axis of a matrix's inputs: an axis that vector units do not run along,
    and that of one head where inputs are heads. They depend on the parameter only, so that codes
    are the same on every mesh and a checkpoint fits every mesh; of 64 rather than bitsandbytes'
    256, so that a block is whole on a device where the inputs are divided over many.
    """
    if view.embedding or not view.rows or math.prod(view.core_shape) < _LEAST_SIZE:
        return None
    axis = view.rows[-1]
    return None if view.shape[axis] % _BLOCK else axis


def scale_by_adam8bit(
    views: Mapping[str, View], *, b1: float, b2: float, eps: float
) -> optax.GradientTransformation:
    """Adam's direction from moments that are kept in 8 bits between updates.

    An update widens the moments to float32, adds the gradient, computes the direction from those
    sums (as `optax.scale_by_adam` does, without rounding) and rounds them for the next update. A
    second moment above zero is never rounded to zero, as in bitsandbytes: its element would move
    by mu / eps where the next gradient is zero.

    Args:
      views: how to see each parameter, by path.
      b1: decay rate of the first moment.
      b2: decay rate of the second moment.
      eps: added to the square root of the second moment.
    """
    axes = {path: block_axis(view) for path, view in views.items()}

    def zeros(path: str, param: jax.Array, *, signed: bool) -> Blocks | jax.Array:
        axis, shape = axes[path], list(param.shape)
        if axis is None:
            return jnp.zeros(shape, param.dtype)
        shape[axis] //= _BLOCK
        codes = jnp.full(param.shape, _ZERO if signed else 0, jnp.uint8)
        return Blocks(codes, jnp.zeros(shape, jnp.float32))

    def init(params: optax.Params) -> Adam8bitState:
        leaves = flatten(params)
        mu = {path: zeros(path, x, signed=True) for path, x in leaves.items()}
        nu = {path: zeros(path, x, signed=False) for path, x in leaves.items()}
        return Adam8bitState(jnp.zeros([], jnp.int32), at_paths(mu)(params), at_paths(nu)(params))

    def wide(path: str, moment: Blocks | jax.Array, *, signed: bool) -> jax.Array:
        axis = axes[path]
        if axis is None or not isinstance(moment, Blocks):
            return jnp.asarray(moment)
        return dequantize(moment, axis, signed=signed)

    def narrow(path: str, moment: jax.Array, *, signed: bool) -> Blocks | jax.Array:
        axis = axes[path]
        return moment if axis is None else quantize(moment, axis, signed=signed)

    def update(
        updates: optax.Updates, state: Adam8bitState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, Adam8bitState]:
        del params
        count = jnp.asarray(increment(state.count))
        old_mu, old_nu = (flatten(x, _is_blocks) for x in (state.mu, state.nu))
        found, mu, nu = {}, {}, {}
        for path, grad in flatten(updates).items():
            m = b1 * wide(path, old_mu[path], signed=True) + (1 - b1) * grad
            v = b2 * wide(path, old_nu[path], signed=False) + (1 - b2) * grad * grad
            m_hat, v_hat = m / (1 - b1**count), v / (1 - b2**count)
            found[path] = m_hat / (jnp.sqrt(v_hat) + eps)
            mu[path] = narrow(path, m, signed=True)
            nu[path] = narrow(path, v, signed=False)
        return at_paths(found)(updates), Adam8bitState(
            count, at_paths(mu)(updates), at_paths(nu)(updates)
        )

    return transformation(init, update)


def quantize(x: jax.Array, axis: int, *, signed: bool) -> Blocks:
    """Each value as the nearest code of its block; without signs a value above zero as the nearest
    one above zero's.

    Args:
      x: float32, not negative unless `signed`.
      axis: along which blocks lie; 64 divides it.
      signed: whether a code has a sign.
    """
    blocked = _blocked(x, axis)
    scales = jnp.max(jnp.abs(blocked), axis=axis + 1)
    # A scale of zero, or one so small that its inverse is infinite, is of nothing but zeros.
    inverse = jnp.where(scales < np.finfo(np.float32).tiny, 0, 1 / scales)
    codes = _encode(blocked * jnp.expand_dims(inverse, axis + 1), signed)
    return Blocks(codes.reshape(x.shape), scales)


def dequantize(blocks: Blocks, axis: int, *, signed: bool) -> jax.Array:
    """The float32 values that `quantize` rounded to."""
    values = _decode(_blocked(blocks.codes, axis), signed)
    return (values * jnp.expand_dims(blocks.scales, axis + 1)).reshape(blocks.codes.shape)


def _encode(x: jax.Array, signed: bool) -> jax.Array:
    size = jnp.abs(x)
    first = 1.0 if signed else 2.0
    # Of the decade of each value: its number of codes, and codes in a unit.
    count = jnp.full(x.shape, np.float32(first))
    slope = jnp.full(x.shape, np.float32(first * 1e6 / 0.9))
    for decade in range(1, _DECADES):
        below, n = first * 2.0 ** (decade - 1), first * 2.0**decade
        # Halfway between the last code of the decade below and the first of this one.
        up = size > np.float32(10.0 ** (decade - _DECADES) * (1 + 0.9 / below))
        count = jnp.where(up, np.float32(n), count)
        slope = jnp.where(up, np.float32(n * 10.0 ** (6 - decade) / 0.9), slope)
    number = count + jnp.clip(jnp.floor(size * slope - count / 9), 0, count - 1)
    last = first * 2.0 ** (_DECADES - 1)
    one = (x if signed else size) > np.float32(1 - 0.225 / last)
    number = jnp.where(one, np.float32(2 * last), number)
    smallest = np.float32(0.5e-6 * (0.1 + 0.45 / first)) if signed else np.float32(0)
    number = jnp.where(size > smallest, number, np.float32(first - 1))
    return (_ZERO + jnp.sign(x) * number if signed else number - 1).astype(jnp.uint8)


def _decode(codes: jax.Array, signed: bool) -> jax.Array:
    number = codes.astype(jnp.int32) - _ZERO if signed else codes.astype(jnp.int32) + 1
    size = jnp.abs(number).astype(jnp.float32)
    first, last = (1.0, 128.0) if signed else (2.0, 256.0)
    # The inverse of the power of two at most `size`, from its exponent.
    bits = jax.lax.bitcast_convert_type(size, jnp.int32) & np.int32(0x7F800000)
    width = jax.lax.bitcast_convert_type(np.int32(254 << 23) - bits, jnp.float32)
    unit = jnp.full(codes.shape, np.float32(1e-6))
    for decade in range(1, _DECADES):
        unit = jnp.where(
            size >= np.float32(first * 2.0**decade), np.float32(10.0 ** (decade - 6)), unit
        )
    value = unit * (np.float32(0.9) * ((size + np.float32(0.5)) * width) - np.float32(0.8))
    value = jnp.where(size == np.float32(last), np.float32(1), value)
    value = jnp.where(size < np.float32(first), np.float32(0), value)
    return jnp.where(number < 0, -value, value) if signed else value


def _blocked(x: jax.Array, axis: int) -> jax.Array:
    """An array with an axis of blocks in front of the one they lie along."""
    return x.reshape(*x.shape[:axis], -1, _BLOCK, *x.shape[axis + 1 :])


def _is_blocks(node: object) -> bool:
    return isinstance(node, Blocks)
