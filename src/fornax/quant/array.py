"""A quantized array that modules read as the floats it stands for.

Scales and zero points keep the array's number of axes: one entry along an axis that shares, as many
as tiles along one that is cut, as many as the array where each entry has its own.
"""

import dataclasses
import math
from dataclasses import dataclass
from functools import partial
from types import EllipsisType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from fornax.config.errors import ConfigError

__all__ = [
    "QTYPES",
    "Calibration",
    "QType",
    "QuantizedArray",
    "QuantizedCodes",
    "QuantizedWeight",
    "parse_calibration",
    "quantize_array",
]


@dataclass(frozen=True)
class QType:
    """A type of codes."""

    name: str
    bits: int
    bound: float
    """The magnitude that a group's greatest value is scaled to. For integers half a step above the
    greatest code, which takes in what rounds to it (as Qwix 0.1.8)."""
    codes: DTypeLike
    """As they are computed with; codes of 4 bits and less lie two in a byte where an axis pairs."""

    @property
    def integer(self) -> bool:
        """Whether codes are integers."""
        return jnp.issubdtype(self.codes, jnp.integer)

    @property
    def limits(self) -> tuple[float, float]:
        """The least and the greatest code."""
        if self.integer:
            return -(2.0 ** (self.bits - 1)), 2.0 ** (self.bits - 1) - 1
        return -self.bound, self.bound


QTYPES = {
    **{
        f"int{bits}": QType(f"int{bits}", bits, 2 ** (bits - 1) - 0.5, jnp.int8)
        for bits in range(2, 9)
    },
    "float8_e4m3fn": QType("float8_e4m3fn", 8, 448.0, jnp.float8_e4m3fn),
    "float8_e5m2": QType("float8_e5m2", 8, 57344.0, jnp.float8_e5m2),
}
"""Types of codes by name."""


class Calibration(NamedTuple):
    """How a group's range is found: a method of `parse_calibration`, and its numbers."""

    method: str
    numbers: tuple[float, ...]


_NUMBERS = {"absmax": (0, 1), "minmax": (0, 1), "rms": (1,), "fixed": (1, 2)}


def parse_calibration(text: str, qtype: QType) -> Calibration:
    """`absmax[,factor]`, `minmax[,factor]`, `rms,factor`, `fixed,bound` or `fixed,least,greatest`.

    Raises:
      ConfigError: for another text, numbers that make no range, or a range with a zero point
        (`minmax`, an uneven `fixed`) for codes other than int8 and int4.
    """
    method, *rest = text.lower().split(",")
    try:
        numbers = tuple(map(float, rest))
    except ValueError:
        numbers = (math.nan,)
    good = method in _NUMBERS and len(numbers) in _NUMBERS[method]
    good = good and all(map(math.isfinite, numbers))
    if good and method == "fixed":
        least, greatest = (-numbers[0], numbers[0]) if len(numbers) == 1 else numbers
        numbers = (least, greatest)
        good = least <= 0 <= greatest and least < greatest
    elif good:
        good = all(number > 0 for number in numbers)
    if not good:
        raise ConfigError(
            f"calibration {text!r} must be absmax, absmax,FACTOR, minmax, minmax,FACTOR, "
            "rms,FACTOR, fixed,BOUND or fixed,LEAST,GREATEST, with positive factors and 0 in the "
            "range"
        )
    found = Calibration(method, numbers)
    if _has_zeros(found) and qtype.name not in ("int8", "int4"):
        raise ConfigError(
            f"calibration {text!r} needs zero points, which {qtype.name} has not; use int8 or "
            "int4, or absmax"
        )
    return found


def _has_zeros(calibration: Calibration) -> bool:
    method, numbers = calibration
    return method == "minmax" or (method == "fixed" and sum(numbers) != 0)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("codes", "scales", "zeros"),
    meta_fields=("qtype", "dtype", "paired"),
)
@dataclass(frozen=True)
class QuantizedArray:
    """Codes, and what they stand for: (code - zero) * scale."""

    codes: jax.Array
    """int8 or a float of 8 bits; uint8 with two codes each where `paired`."""
    scales: jax.Array
    """In the array's dtype."""
    zeros: jax.Array | None
    """int8, or None for zeros of 0."""
    qtype: str
    """A key of `QTYPES`."""
    dtype: str
    """Of the array that this stands for."""
    paired: int | None = None
    """The axis, counted from the last, along which two neighbours lie in a byte, the first in its
    low half."""

    def __getitem__(self, index: EllipsisType) -> "QuantizedArray":
        """All of it, which is all that modules ask of a weight."""
        if index is not ...:
            raise ConfigError("a quantized weight is read whole, by [...]")
        return self

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the array."""
        if self.paired is None:
            return self.codes.shape
        shape = list(self.codes.shape)
        shape[self.paired] *= 2
        return tuple(shape)

    @property
    def ndim(self) -> int:
        """Axes."""
        return self.codes.ndim

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and zero points."""
        return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(self))

    @property
    def integers(self) -> jax.Array:
        """Codes, one per element."""
        if self.paired is None:
            return self.codes
        # Arithmetic shifts of int8 keep the sign.
        signed = jax.lax.bitcast_convert_type(self.codes, jnp.int8)
        pairs = jnp.stack([(signed << 4) >> 4, signed >> 4], axis=self.ndim + self.paired + 1)
        return pairs.reshape(self.shape)

    def dequantize(self) -> jax.Array:
        """What the codes stand for, in `dtype`."""
        scales = _spread(self.scales, self.shape)
        wide = self.integers.astype(scales.dtype)
        if self.zeros is not None:
            wide = wide - _spread(self.zeros, self.shape).astype(wide.dtype)
        return (wide * scales).astype(self.dtype)


def quantize_array(
    x: jax.Array,
    qtype: QType,
    calibration: Calibration,
    shared: tuple[int, ...],
    tiles: dict[int, int] | None = None,
) -> QuantizedArray:
    """Round an array to codes.

    Args:
      x: floats.
      qtype: of codes.
      calibration: how ranges are found.
      shared: axes along which entries share a scale.
      tiles: of these, those that are cut, and into how long pieces.

    The formulas are Qwix 0.1.8's; so are the codes of float32, where it compiles them. Entries of
    other dtypes are scaled in float32.
    """
    tiles = tiles or {}
    parts = _cut(x, tiles)
    # A cut axis is two: pieces, which keep their own scales, and places within one.
    offset, reduced = 0, []
    for axis in range(x.ndim):
        if axis in tiles:
            offset += 1
        if axis in shared:
            reduced.append(axis + offset)
    shape = tuple(
        x.shape[axis] // tiles[axis] if axis in tiles else 1 if axis in shared else x.shape[axis]
        for axis in range(x.ndim)
    )
    least, greatest = qtype.limits
    zeros = None
    if _has_zeros(calibration):
        low, high = _range(parts, calibration, tuple(reduced))
        scales = _usable((high - low) / (greatest - least)).reshape(shape)
        # As for codes, rounding to the nearest, and to the nearest end beyond.
        zeros = _codes(least - low.reshape(shape) / scales, qtype)
    else:
        most = _most(parts, calibration, tuple(reduced))
        scales = _usable(most / qtype.bound).reshape(shape)
    scales = scales.astype(x.dtype)
    # Not divided: within some programs and not within others XLA makes this of a division.
    unit = x.astype(jnp.float32) * _spread(1 / scales.astype(jnp.float32), x.shape)
    if zeros is not None:
        unit = unit + _spread(zeros, x.shape).astype(unit.dtype)
    made = QuantizedArray(_codes(unit, qtype), scales, zeros, qtype.name, jnp.dtype(x.dtype).name)
    return _paired(made, qtype)


def _most(parts: jax.Array, calibration: Calibration, axes: tuple[int, ...]) -> jax.Array:
    method, numbers = calibration
    if method == "rms":
        return jnp.sqrt(jnp.mean(jnp.square(parts), axes, keepdims=True)) * numbers[0]
    if method == "fixed":
        shape = jax.eval_shape(lambda x: jnp.max(x, axes, keepdims=True), parts).shape
        return jnp.full(shape, numbers[1], parts.dtype)
    most = jnp.max(jnp.abs(parts), axes, keepdims=True)
    return most * numbers[0] if numbers else most


def _range(
    parts: jax.Array, calibration: Calibration, axes: tuple[int, ...]
) -> tuple[jax.Array, jax.Array]:
    method, numbers = calibration
    low = jnp.minimum(jnp.min(parts, axes, keepdims=True), 0)
    high = jnp.maximum(jnp.max(parts, axes, keepdims=True), 0)
    if method == "fixed":
        return jnp.full_like(low, numbers[0]), jnp.full_like(high, numbers[1])
    return (low * numbers[0], high * numbers[0]) if numbers else (low, high)


def _usable(scales: jax.Array) -> jax.Array:
    """1 where a scale is 0, or so small that its inverse squared is none."""
    return jnp.where(scales < jnp.sqrt(jnp.finfo(scales.dtype).tiny), 1, scales)


def _codes(unit: jax.Array, qtype: QType) -> jax.Array:
    least, greatest = qtype.limits
    if qtype.integer:
        unit = jnp.round(unit)
    return jnp.clip(unit, least, greatest).astype(qtype.codes)


def _paired(made: QuantizedArray, qtype: QType) -> QuantizedArray:
    """Codes of 4 bits and less, two in a byte along the last axis that has an even size."""
    even = [axis for axis in range(-1, -made.codes.ndim - 1, -1) if made.codes.shape[axis] % 2 == 0]
    if not qtype.integer or qtype.bits > 4 or not even:
        return made
    axis = made.codes.ndim + even[0]
    pairs = _cut(made.codes, {axis: 2})
    low, high = (jax.lax.index_in_dim(pairs, at, axis + 1, keepdims=False) for at in (0, 1))
    bytes_ = jax.lax.bitcast_convert_type((low & 15) | (high << 4), jnp.uint8)
    return dataclasses.replace(made, codes=bytes_, paired=even[0])


def _cut(x: jax.Array, tiles: dict[int, int]) -> jax.Array:
    shape: list[int] = []
    for axis, size in enumerate(x.shape):
        shape += [size // tiles[axis], tiles[axis]] if axis in tiles else [size]
    return x.reshape(shape)


def _spread(scales: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Scales, one for each entry of an array or broadcasting against it."""
    for axis, (few, size) in enumerate(zip(scales.shape, shape, strict=True)):
        if few not in (1, size):
            scales = jnp.repeat(scales, size // few, axis=axis)
    return scales


class QuantizedCodes(nnx.Variable):
    """A quantized weight, in place of a parameter: no optimizer's filter finds it.

    Its value is a `QuantizedArray`, and so is what is read of it.
    """


class QuantizedWeight(QuantizedCodes):
    """The same, read as the floats that it stands for: to be multiplied at once, not kept."""

    def get_value(self, *, index: Any = ...) -> jax.Array:
        """The floats."""
        value = self.get_raw_value()
        floats = value.dequantize() if isinstance(value, QuantizedArray) else value
        return floats if index is ... else floats[index]
