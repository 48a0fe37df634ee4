"""Rounding matrices to codes of few bits, and what the codes stand for.

A value is (code - zero point) x scale. Scales are rounded to the dtype that a file holds before
codes are chosen, so that rounding them costs nothing. Scales of float8 (NVFP4) are divided by one
float32 of the whole matrix, which brings the greatest of them to the greatest float8; powers of two
(MXFP4) are the one at or below the cell's greatest value over e2m1's greatest power, 4 (OCP
Microscaling Formats 1.0, section 6.3), or twice that.

`find_scales` and `nearest` take arrays of NumPy and of JAX. But for scales of float8 they give the
same numbers bit for bit: what training rounds is what a file holds. So they have no sum whose
result depends on its order, no product beside a sum, which compilers fuse, and no division by what
is constant or repeated, which XLA makes a product of the inverse. Errors are added up as integers.

Legend: O outputs, I inputs, P and G cells of outputs and inputs that share a scale, p and g outputs
and inputs of a cell; A, B and a, b are the same in either order.
"""

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

from fornax.quant.schemes import Scheme

__all__ = [
    "Codes",
    "Grid",
    "dequantize",
    "find_grid",
    "find_scales",
    "greatest",
    "nearest",
    "quantize",
    "round_matrix",
    "rounded_to",
    "scale_divisor",
    "spread",
]

Array = Any
"""Of NumPy or of JAX; functions give what they are given."""
_LEAST = 2.0**-100
"""Of scales: numbers that some processors take for 0 are less than half a step."""
_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
_LEAST_E4M3 = np.float32(2**-9)
"""Float8's smallest number above 0."""
_CHUNK = 2**18
"""Weights rounded at a time."""


class Grid(NamedTuple):
    """What each cell's codes are counted in."""

    scales_PG: np.ndarray
    """In the dtype of the file."""
    zeros_PG: np.ndarray | None
    """int8 codes of 0; None where 0 is."""
    divisor: np.float32 | None = None
    """By what scales are divided, of a whole matrix; None: 1."""


class Codes(NamedTuple):
    """A quantized matrix."""

    values_OI: np.ndarray
    """Of dtype `Scheme.codes`: int8 from -2^(bits - 1), float8_e4m3fn or float4_e2m1fn."""
    grid: Grid


def round_matrix(
    w_OI: np.ndarray,
    scheme: Scheme,
    dtype: np.dtype,
    importance_I: np.ndarray | None = None,
    largest: float | None = None,
) -> Codes:
    """Round to the nearest codes, some rows at a time in each thread.

    Args:
      w_OI: finite floats of any dtype.
      scheme: how.
      dtype: of scales where the scheme does not say.
      importance_I: weights of the squared error by input; None: all alike. Useful where it clips.
      largest: the greatest magnitude of this and all matrices that are to have one divisor of
        scales; None for that of this one.
    """
    divisor = None
    if scheme.scales == "e4m3":
        divisor = scale_divisor(greatest(w_OI) if largest is None else largest, scheme.largest)
    with ThreadPoolExecutor() as pool:
        parts = [
            *pool.map(
                lambda rows: _round(w_OI[rows], scheme, dtype, importance_I, divisor),
                _chunks(w_OI.shape, scheme),
            )
        ]
    zeros = [part.grid.zeros_PG for part in parts if part.grid.zeros_PG is not None]
    return Codes(
        np.concatenate([part.values_OI for part in parts]),
        Grid(
            np.concatenate([part.grid.scales_PG for part in parts]),
            np.concatenate(zeros) if zeros else None,
            divisor,
        ),
    )


def greatest(w_OI: np.ndarray) -> float:
    """The greatest magnitude in a matrix, read some rows at a time."""
    step = max(1, _CHUNK // w_OI.shape[-1])
    parts = (w_OI[at : at + step] for at in range(0, len(w_OI), step))
    return max(float(np.abs(part.astype(np.float32)).max(initial=0)) for part in parts)


def scale_divisor(largest: float, code: float) -> np.float32:
    """What brings the scale of the greatest value to the greatest float8, 448.

    Args:
      largest: that value; 0 gives 1.
      code: the greatest code.
    """
    found = np.float32(448 * code) / np.float32(largest or 448 * code)
    return found if np.isfinite(found) else np.float32(1)


def _chunks(shape: tuple[int, ...], scheme: Scheme) -> Iterator[slice]:
    """Whole rows of cells."""
    rows = scheme.cell((shape[0], shape[1]))[0]
    step = rows * max(1, _CHUNK // (rows * shape[1]))
    return (slice(start, start + step) for start in range(0, shape[0], step))


def _round(
    w_OI: np.ndarray,
    scheme: Scheme,
    dtype: np.dtype,
    importance_I: np.ndarray | None,
    divisor: np.float32 | None,
) -> Codes:
    w_OI = w_OI.astype(np.float32, order="C")
    grid = find_grid(w_OI, scheme, dtype, importance_I, divisor)
    return Codes(quantize(w_OI, *spread(grid, scheme, w_OI.shape), scheme), grid)


def find_grid(
    w_OI: np.ndarray,
    scheme: Scheme,
    dtype: np.dtype,
    importance_I: np.ndarray | None = None,
    divisor: np.float32 | None = None,
) -> Grid:
    """Scales, and zero points, of float32 weights: of the whole range of each cell, or, where the
    scheme clips, of the multiple of it that leaves the least squared error."""
    outputs, inputs = w_OI.shape
    p, g = scheme.cell((outputs, inputs))
    padded = np.pad(w_OI, ((0, -outputs % p), (0, -inputs % g)))
    w_PpGg = padded.reshape(padded.shape[0] // p, p, padded.shape[1] // g, g)
    weights = None
    if importance_I is not None:
        weights = np.pad(importance_I.astype(np.float32), (0, -inputs % g)).reshape(1, 1, -1, g)
    scales, zeros = find_scales(w_PpGg, scheme, dtype, weights, divisor)
    shape = w_PpGg.shape[::2]
    held = scales if divisor is None else scales * divisor
    points = None if zeros is None else zeros.reshape(shape).astype(np.int8)
    return Grid(held.reshape(shape).astype(scheme.stored_scales or dtype), points, divisor)


def _library(array: Array) -> Any:
    return np if isinstance(array, np.ndarray) else jnp


def find_scales(
    w_AaBb: Array,
    scheme: Scheme,
    dtype: np.dtype,
    weights: Array | None = None,
    divisor: np.float32 | None = None,
) -> tuple[Array, Array | None]:
    """`find_grid` of cells that lie in the last four axes.

    Args:
      w_AaBb: float32 [..., A, a, B, b]; a and b are of one cell.
      scheme: how.
      dtype: of the file's scales where the scheme does not say: float32, bfloat16 or float16.
      weights: of the squared error, of a shape that broadcasts; None: all alike. Sums are floats
        then, whose order counts.
      divisor: of scales of float8.

    Returns:
      What codes are multiplied with, float32, and zero points [..., A, 1, B, 1]; None for the
      points where they are 0.
    """
    xp = _library(w_AaBb)
    best, best_zeros = _of_range(w_AaBb, scheme, dtype, scheme.shares[0], divisor)
    if len(scheme.shares) == 1:
        return best, best_zeros
    parts = None
    if scheme.scales != "e4m3":
        parts = _parts_of_step(scheme, cell=w_AaBb.shape[-3] * w_AaBb.shape[-1])
    least, whole = _error(w_AaBb, best, best_zeros, scheme, weights, parts), 1 / best
    for share in scheme.shares[1:]:
        scales, zeros = _of_range(w_AaBb, scheme, dtype, share, divisor)
        ratio = scales * whole
        error = _error(w_AaBb, scales, zeros, scheme, weights, parts) * (ratio * ratio)
        better = error < least
        least = xp.where(better, error, least)
        best = xp.where(better, scales, best)
        if zeros is not None:
            best_zeros = xp.where(better, zeros, best_zeros)
    return best, best_zeros


def _of_range(
    w_AaBb: Array, scheme: Scheme, dtype: np.dtype, share: float, divisor: np.float32 | None
) -> tuple[Array, Array | None]:
    """Scales and zero points of a share of each cell's range."""
    xp, cell = _library(w_AaBb), (-3, -1)
    # A cell of zeros has codes of 0 whatever its scale is, as long as that is a number above 0.
    least = np.float32(max(_LEAST, float(ml_dtypes.finfo(dtype).tiny)))
    if scheme.symmetric:
        most = xp.max(xp.abs(w_AaBb), axis=cell, keepdims=True)
        if scheme.scales == "e8m0":  # the exponent of float32, without its digits
            power = (most.view(np.int32) & 0x7F800000).view(np.float32)
            return xp.maximum(power * np.float32(share / 4), np.float32(_LEAST)), None
        scales = most * np.float32(share / scheme.largest)
        if divisor is not None:
            return rounded_to(xp.clip(scales * divisor, _LEAST_E4M3, 448), _E4M3) / divisor, None
        return xp.maximum(rounded_to(scales, dtype), least), None
    low = xp.minimum(xp.min(w_AaBb, axis=cell, keepdims=True), 0)
    high = xp.maximum(xp.max(w_AaBb, axis=cell, keepdims=True), 0)
    steps = 2**scheme.bits - 1
    scales = xp.maximum(rounded_to((high - low) * np.float32(share / steps), dtype), least)
    zeros = xp.clip(xp.rint(-low * np.float32(share) * (1 / scales)), 0, steps)
    return scales, zeros - 2 ** (scheme.bits - 1)


def _parts_of_step(scheme: Scheme, cell: int) -> int:
    """Parts of a step, a power of two, that errors are counted in: as many as keep the sum of a
    cell's squares within 31 bits."""
    if scheme.scales == "e8m0":  # values reach 8 steps
        most = 8 - scheme.largest + 0.5
    else:
        codes = scheme.largest if scheme.symmetric else 2**scheme.bits - 1
        most = codes * (1 / min(scheme.shares) - 1) + 1.5
    return 1 << math.floor(math.log2(math.sqrt(2**31 / cell) / most))


def _error(
    w: Array,
    scales: Array,
    zeros: Array | None,
    scheme: Scheme,
    weights: Array | None,
    parts: int | None,
) -> Array:
    """Squared errors [..., A, 1, B, 1], float32: of integers, in squares of a part of a step, or of
    floats in squares of a step where there are no parts."""
    xp, cell = _library(w), (-3, -1)
    steps = w * (1 / scales)
    codes = _nearest(steps, zeros, scheme)
    codes = codes if zeros is None else codes - zeros
    if parts is None:
        off = steps - codes
    else:
        size = np.float32(parts)
        off = xp.rint(steps * size).astype(np.int32) - (codes * size).astype(np.int32)
    squares = off * off
    if weights is not None:
        return xp.sum(squares * weights, axis=cell, keepdims=True)
    return xp.sum(squares, axis=cell, keepdims=True, dtype=squares.dtype).astype(np.float32)


def rounded_to(x: Array, dtype: np.dtype) -> Array:
    """float32 numbers rounded to those of a narrower dtype, ties to even.

    Args:
      x: float32.
      dtype: float32, bfloat16, float16, float8_e4m3fn or float4_e2m1fn (x within the range of the
        last two).
    """
    if dtype == np.float32:
        return x
    if dtype == ml_dtypes.float4_e2m1fn:  # 0, 0.5, 1, 1.5, 2, 3, 4, 6
        xp, size = _library(x), _library(x).abs(x)
        two, one, half = np.float32(2), np.float32(1), np.float32(0.5)
        inverse = xp.where(size < 2, two, xp.where(size < 4, one, half))
        return xp.rint(x * inverse) * xp.where(size < 2, half, xp.where(size < 4, one, two))
    if isinstance(x, np.ndarray):
        return x.astype(dtype).astype(np.float32)
    # Not by a conversion there and back, which XLA may leave out.
    if dtype == ml_dtypes.bfloat16:
        return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    if dtype == np.float16:  # and its numbers below the normal ones
        small = jnp.rint(x * np.float32(2**24)) * np.float32(2**-24)
        normal = lax.reduce_precision(x, exponent_bits=5, mantissa_bits=10)
        return jnp.where(jnp.abs(x) < np.float32(2**-14), small, normal)
    assert dtype == _E4M3, dtype
    exponent = (lax.bitcast_convert_type(x, jnp.int32) >> 23) & 255
    exponent = jnp.maximum(exponent, 127 - 6) - 3  # of the last of four digits
    step = lax.bitcast_convert_type(exponent << 23, jnp.float32)
    inverse = lax.bitcast_convert_type((254 - exponent) << 23, jnp.float32)
    return jnp.rint(x * inverse) * step


def _float_scales(grid: Grid) -> np.ndarray:
    """What codes are multiplied with, float32 [P, G]."""
    scales_PG = grid.scales_PG.astype(np.float32)
    return scales_PG if grid.divisor is None else scales_PG / grid.divisor


def spread(
    grid: Grid, scheme: Scheme, shape: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray | None]:
    """Scale (float32) and zero point of each weight of a matrix [O, I]."""
    p, g = scheme.cell(shape)

    def over(held_PG: np.ndarray) -> np.ndarray:
        rows = held_PG if p == 1 else np.repeat(held_PG, p, axis=0)[: shape[0]]
        return np.repeat(rows, g, axis=1)[:, : shape[1]]

    zeros = None if grid.zeros_PG is None else over(grid.zeros_PG)
    return over(_float_scales(grid)), zeros


def quantize(
    w: np.ndarray, scales: np.ndarray, zeros: np.ndarray | None, scheme: Scheme
) -> np.ndarray:
    """The nearest codes of float32 weights, given scales and zero points of shapes that broadcast;
    what lies beyond the codes becomes the last of them."""
    if scheme.type == "float":
        limit = np.float32(scheme.largest)
        return np.clip(w * (1 / scales), -limit, limit).astype(scheme.codes)
    return nearest(w, scales, zeros, scheme).astype(np.int8)


def nearest(w: Array, scales: Array, zeros: Array | None, scheme: Scheme) -> Array:
    """`quantize` to float32 numbers, of arrays of either kind."""
    return _nearest(w * (1 / scales), zeros, scheme)


def _nearest(steps: Array, zeros: Array | None, scheme: Scheme) -> Array:
    """The codes of numbers of steps."""
    xp = _library(steps)
    if scheme.type == "float":
        limit = np.float32(scheme.largest)
        return rounded_to(xp.clip(steps, -limit, limit), scheme.codes)
    steps = xp.rint(steps)
    if zeros is not None:
        steps = steps + zeros
    half = 2 ** (scheme.bits - 1)
    return xp.clip(steps, -half, half - 1)


def dequantize(codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray | None) -> np.ndarray:
    """The float32 numbers that codes stand for, given float32 scales of a shape that broadcasts."""
    wide = codes.astype(np.float32)
    return (wide if zeros is None else wide - zeros) * scales
