"""Formats of weights of few bits: how they are rounded to codes, and what codes stand for.

Legend: L layers, K inputs, N outputs, G groups of inputs, g inputs of a group.
"""

import dataclasses
from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from fornax.config.errors import KernelError

__all__ = ["FORMATS", "Format", "Parts", "Precision", "dequantize", "group_of", "quantize"]

Precision = Literal["float32", "bfloat16", "int8", "int4", "fp8", "mxfp4"]


class Parts(NamedTuple):
    """The arrays of a weight: as codes, which is said here, or laid out for an implementation."""

    values: jax.Array
    """[L, K, N]: floats, int8, int4's uint8 from 0 to 15, float8_e4m3fn, or e2m1 as such uint8."""
    scales: jax.Array | None = None
    """[L, G, N]: float32, or e8m0 as uint8."""
    zeros: jax.Array | None = None
    """[L, G, N] uint8: the code of 0, for int4."""


@dataclasses.dataclass(frozen=True)
class Format:
    """A format of few bits."""

    bits: int
    """Of a code."""
    group: int | None
    """Inputs that share a scale, where none are asked for; None for all inputs of an output."""
    groups: tuple[int | None, ...]
    """What may be asked for."""
    quantize: Callable[[jax.Array], Parts]
    """From float32 [L, G, g, N] to values of that shape, and scales and zeros [L, G, N]."""
    widen: Callable[[jax.Array], jax.Array]
    """Codes to float32, before zeros and scales."""
    widen_scale: Callable[[jax.Array], jax.Array]
    """Scales to float32."""
    rows: DTypeLike
    """What x is rounded to where it is not rounded to integers."""


def group_of(precision: Precision, group: int | None) -> int | None:
    """Return the inputs that share a scale, given what was asked for.

    Raises:
        KernelError: an unknown precision, or a group that it does not have.
    """
    if precision not in get_args(Precision):
        names = ", ".join(get_args(Precision))
        raise KernelError(f"precision={precision!r} is unknown; use one of {names}")
    if precision not in FORMATS:
        if group is not None:
            raise KernelError(
                f"group={group} is for weights of few bits; {precision} has no groups"
            )
        return None
    taken = FORMATS[precision]
    if group is None:
        return taken.group
    if group not in taken.groups:
        names = ", ".join(map(str, taken.groups))
        raise KernelError(f"group={group} is none of {precision}'s, {names}; use one of them")
    return group


def quantize(w_LKN: jax.Array, precision: Precision, group: int | None) -> Parts:
    """Round a weight to the nearest codes.

    A group of zeros has scale 0. A value that is not finite makes its group's scale NaN, and with
    it every product that the group takes part in.

    Args:
        w_LKN: any floating dtype.
        precision: one of `FORMATS`.
        group: inputs that share a scale; None for all.
    """
    L, K, N = w_LKN.shape
    g = group or K
    padded = jnp.pad(w_LKN.astype(jnp.float32), ((0, 0), (0, -K % g), (0, 0)))
    w_LGgN = padded.reshape(L, -1, g, N)
    finite = jnp.isfinite(w_LGgN)
    values, scales, zeros = FORMATS[precision].quantize(jnp.where(finite, w_LGgN, 0))
    assert scales is not None, "codes have scales"
    nan = _E8M0_NAN if scales.dtype == jnp.uint8 else jnp.nan
    scales = jnp.where(jnp.all(finite, axis=2), scales, jnp.asarray(nan, scales.dtype))
    return Parts(values.reshape(L, -1, N)[:, :K], scales, zeros)


def dequantize(codes: Parts, precision: Precision, group: int | None) -> jax.Array:
    """Return the float32 [L, K, N] that codes stand for: (value - zero) * scale."""
    taken, (values, scales, zeros) = FORMATS[precision], codes
    assert scales is not None, "codes have scales"
    K = values.shape[1]

    def spread(each: jax.Array) -> jax.Array:
        return jnp.repeat(each, group or K, axis=1)[:, :K]

    wide = taken.widen(values)
    if zeros is not None:
        wide = wide - spread(zeros.astype(jnp.float32))
    return wide * spread(taken.widen_scale(scales))


_E8M0_NAN = 255


def _float32(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)


def _inverse(scales: jax.Array) -> jax.Array:
    """1 / scale; 0 where the scale is 0 or a denormal."""
    usable = scales >= jnp.finfo(jnp.float32).tiny
    return jnp.where(usable, 1 / jnp.where(usable, scales, 1), 0)


def _most(w_LGgN: jax.Array) -> jax.Array:
    return jnp.max(jnp.abs(w_LGgN), axis=2)


def _int8(w_LGgN: jax.Array) -> Parts:
    scales = _most(w_LGgN) / 127
    values = jnp.round(w_LGgN * _inverse(scales)[:, :, None])
    return Parts(values.astype(jnp.int8), scales)


def _int4(w_LGgN: jax.Array) -> Parts:
    """Sixteen steps from the least to the greatest value of a group, with 0 among them.

    (Jacob et al. 2018, section 3; what files of GPTQ and AWQ hold.)
    """
    low = jnp.minimum(jnp.min(w_LGgN, axis=2), 0)
    high = jnp.maximum(jnp.max(w_LGgN, axis=2), 0)
    scales = high / 15 - low / 15
    inverse = _inverse(scales)
    zeros = jnp.round(-low * inverse)
    steps = jnp.round(w_LGgN * inverse[:, :, None]) + zeros[:, :, None]
    return Parts(jnp.clip(steps, 0, 15).astype(jnp.uint8), scales, zeros.astype(jnp.uint8))


def _fp8(w_LGgN: jax.Array) -> Parts:
    scales = _most(w_LGgN) / 448
    scaled = w_LGgN * _inverse(scales)[:, :, None]
    return Parts(scaled.astype(jnp.float8_e4m3fn), scales)


def _mxfp4(w_LGgN: jax.Array) -> Parts:
    """The power of two at or below the greatest value, over that of e2m1's greatest, 4.

    What lies above 6 times the scale becomes that (OCP Microscaling Formats 1.0, section 6.3).
    """
    most = _most(w_LGgN)
    exponent = (lax.bitcast_convert_type(most, jnp.uint32) >> 23).astype(jnp.int32)
    code = jnp.maximum(exponent - 2, 0)
    scaled = w_LGgN * _inverse(_e8m0(code))[:, :, None]
    size = jnp.abs(scaled)
    # Halfway from one size to the next; ties go to even codes.
    above = [size > limit for limit in (0.25, 1.25, 2.5, 5.0)]
    reached = [size >= limit for limit in (0.75, 1.75, 3.5)]
    index = sum(each.astype(jnp.uint8) for each in above + reached)
    values = index | jnp.where(scaled < 0, jnp.uint8(8), jnp.uint8(0))
    return Parts(values, code.astype(jnp.uint8))


def _e2m1(code: jax.Array) -> jax.Array:
    """Sign, 0 0.5 1 1.5 2 3 4 6."""
    index = (code & 7).astype(jnp.int32)
    normal = (((index >> 1) + 126) << 23) | ((index & 1) << 22)
    size = jnp.where(index < 2, 0.5 * index, lax.bitcast_convert_type(normal, jnp.float32))
    return jnp.where(code & 8, -size, size)


def _e8m0(code: jax.Array) -> jax.Array:
    """2^(code - 127); 255 is NaN, and 0, a denormal, counts as 0."""
    bits = jnp.where(code == _E8M0_NAN, 0x7FC00000, code.astype(jnp.int32) << 23)
    return lax.bitcast_convert_type(bits, jnp.float32)


_GROUPS = (32, 64, 128)

FORMATS: dict[str, Format] = {
    "int8": Format(8, 64, _GROUPS, _int8, _float32, _float32, jnp.float32),
    "int4": Format(4, 64, _GROUPS, _int4, _float32, _float32, jnp.float32),
    "fp8": Format(8, None, _GROUPS, _fp8, _float32, _float32, jnp.bfloat16),
    "mxfp4": Format(4, 32, (32,), _mxfp4, _e2m1, _e8m0, jnp.bfloat16),
}
"""Formats of few bits by precision."""
