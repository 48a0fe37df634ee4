"""Products of codes: what a quantized module calls where its inputs are rounded too."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

from fornax.models.kernel_layout import einsum_parts
from fornax.quant.array import QTYPES, Calibration, QuantizedArray, quantize_array

__all__ = ["QuantizedConv", "QuantizedDot", "QuantizedEinsum", "promote"]


def promote(values: Sequence[Any], /, **options: Any) -> tuple[Any, ...]:
    """flax's `promote_dtype`, which passes quantized weights by."""
    plain = tuple(None if isinstance(value, QuantizedArray) else value for value in values)
    promoted = nnx.nn.dtypes.promote_dtype(plain, **options)
    return tuple(
        value if isinstance(value, QuantizedArray) else one
        for value, one in zip(values, promoted, strict=True)
    )


@dataclass(frozen=True)
class QuantizedDot:
    """`lax.dot_general` of rows that are rounded as they come, and a quantized weight."""

    qtype: str
    calibration: Calibration

    def __call__(
        self,
        x: jax.Array,
        weight: QuantizedArray,
        dimension_numbers: lax.DotDimensionNumbers,
        precision: lax.PrecisionLike = None,
        preferred_element_type: DTypeLike | None = None,
        out_sharding: Any = None,
    ) -> jax.Array:
        """The product, in x's dtype.

        Integers are multiplied as such and summed in int32. Where scales change along what is
        summed over, or there are zero points, or codes are floats, what codes stand for is
        multiplied.
        """
        del preferred_element_type
        summed = dimension_numbers[0]
        rows = quantize_array(x, QTYPES[self.qtype], self.calibration, tuple(summed[0]))
        options: dict[str, Any] = {"dimension_numbers": dimension_numbers}
        if out_sharding is not None:
            options["out_sharding"] = out_sharding
        if not _whole(rows, summed[0]) or not _whole(weight, summed[1]):
            floats = (rows.dequantize(), weight.dequantize().astype(x.dtype))
            return lax.dot_general(*floats, precision=precision, **options)
        counts = lax.dot_general(
            rows.integers, weight.integers, preferred_element_type=jnp.int32, **options
        )
        # What is summed over has one scale: their product is that of scales of each pair.
        scales = lax.dot_general(
            rows.scales.astype(jnp.float32), weight.scales.astype(jnp.float32), dimension_numbers
        )
        return (counts.astype(jnp.float32) * scales).astype(x.dtype)


@dataclass(frozen=True)
class QuantizedEinsum:
    """`jnp.einsum` of rows that are rounded as they come, and a quantized weight."""

    qtype: str
    calibration: Calibration

    def __call__(
        self,
        spec: str,
        x: jax.Array,
        weight: QuantizedArray,
        precision: lax.PrecisionLike = None,
        preferred_element_type: DTypeLike | None = None,
        out_sharding: Any = None,
    ) -> jax.Array:
        """The product, in x's dtype; integers and floats as in `QuantizedDot`."""
        del preferred_element_type
        lhs, rhs, out = einsum_parts(spec)
        summed = [
            tuple(at for at, letter in enumerate(side) if letter not in out) for side in (lhs, rhs)
        ]
        rows = quantize_array(x, QTYPES[self.qtype], self.calibration, summed[0])
        options: dict[str, Any] = {} if out_sharding is None else {"out_sharding": out_sharding}
        if not _whole(rows, summed[0]) or not _whole(weight, summed[1]):
            floats = (rows.dequantize(), weight.dequantize().astype(x.dtype))
            return jnp.einsum(spec, *floats, precision=precision, **options)
        integers = (rows.integers, weight.integers)
        counts = jnp.einsum(spec, *integers, preferred_element_type=jnp.int32, **options)
        scales = (each.scales.astype(jnp.float32) for each in (rows, weight))
        return (counts.astype(jnp.float32) * jnp.einsum(spec, *scales)).astype(x.dtype)


@dataclass(frozen=True)
class QuantizedConv:
    """`lax.conv_general_dilated` of images that are rounded as they come, each with one scale."""

    qtype: str
    calibration: Calibration

    def __call__(
        self,
        x: jax.Array,
        weight: QuantizedArray,
        window_strides: Sequence[int],
        padding: Any,
        *,
        dimension_numbers: Any = None,
        preferred_element_type: DTypeLike | None = None,
        **options: Any,
    ) -> jax.Array:
        """The convolution, in x's dtype; integers and floats as in `QuantizedDot`."""
        del preferred_element_type
        numbers = lax.conv_dimension_numbers(x.shape, weight.shape, dimension_numbers)
        lhs, rhs, out = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
        shared = tuple(axis for axis in range(x.ndim) if axis != lhs[0])
        rows = quantize_array(x, QTYPES[self.qtype], self.calibration, shared)
        given: dict[str, Any] = {**options, "dimension_numbers": numbers}
        operands = (window_strides, padding)
        if not _whole(rows, shared) or not _whole(weight, rhs[1:]):
            floats = (rows.dequantize(), weight.dequantize().astype(x.dtype))
            return lax.conv_general_dilated(*floats, *operands, **given)
        given.pop("precision", None)
        counts = lax.conv_general_dilated(
            rows.integers,
            weight.integers,
            *operands,
            preferred_element_type=jnp.int32,
            **given,
        )
        shape = [1] * x.ndim
        shape[out[0]] = rows.scales.shape[lhs[0]]
        images = rows.scales.reshape(shape).astype(jnp.float32)
        shape = [1] * x.ndim
        shape[out[1]] = weight.scales.shape[rhs[0]]
        outputs = weight.scales.reshape(shape).astype(jnp.float32)
        return (counts.astype(jnp.float32) * images * outputs).astype(x.dtype)


def _whole(x: QuantizedArray, summed: Sequence[int]) -> bool:
    """Whether integers can be summed before they are scaled."""
    integer = QTYPES[x.qtype].integer and x.zeros is None
    return integer and all(x.scales.shape[axis] == 1 for axis in summed)
