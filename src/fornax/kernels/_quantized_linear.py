"""The linear layer of training in 8 bits: its three products multiply codes.

x has a scale for each row, w one for each output. Scales that a backward product would sum over are
multiplied into the incoming gradient before that is rounded, so that all three products share the
codes of x and w, and the gradients are those of the product of what the codes stand for:

    y = s_x s_w (X W),   dx = s (R(dy s_w) W^T),   dw = s' (X^T R'(dy s_x))

R rounds stochastically, with a scale for each row, R' with one for each output. Nothing is
differentiated through rounding (straight-through).

As in `linear` the forward products are ordinary `dot_general`s, named `LINEAR_OUTPUT`, and only the
tangents are primitives. On a mesh w is rounded where it lies, and its codes are gathered.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir
from jax.typing import DTypeLike

from fornax.config.errors import KernelError
from fornax.kernels._linear import LINEAR_OUTPUT
from fornax.kernels._noise import index_noise
from fornax.mesh import constrain, current_rules, dividing, shards

__all__ = ["PRODUCT_SCHEMES", "ProductScheme", "quantized_linear"]


class ProductScheme(NamedTuple):
    """What the operands of products are rounded to."""

    values: Any
    """Dtype of the codes of x and w, which are rounded to the nearest."""
    gradients: Any
    """Dtype of those of gradients."""
    sums: Any
    """Dtype that products are summed in."""


PRODUCT_SCHEMES: Mapping[str, ProductScheme] = {
    "int8": ProductScheme(jnp.int8, jnp.int8, jnp.int32),
    "fp8": ProductScheme(jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float32),
}
"""By the name that a user gives."""

_LONGEST = (2**31 - 1) // 127**2
"""Products of two int8 codes that an int32 has room for."""


class _Call(NamedTuple):
    scheme: str
    inputs: int
    axes: tuple[str | None, ...] | None
    """Logical axes of w."""


class _Codes(NamedTuple):
    """values x scale, of which scale lacks the axes that share one."""

    values: jax.Array
    scale: jax.Array


def quantized_linear(
    x: jax.Array,
    w: jax.Array,
    noise: jax.Array,
    *,
    scheme: str,
    inputs: int = 1,
    axes: Sequence[str | None] | None = None,
) -> jax.Array:
    """Sum over the last `inputs` axes of x and the first `inputs` axes of w, in codes of 8 bits.

    Args:
        x: [*rows, *in], float32 or bfloat16.
        w: [*in, *out], likewise.
        noise: integer scalar that the gradients' stochastic rounding takes its random bits from.
        scheme: of `PRODUCT_SCHEMES`.
        inputs: how many axes are summed over.
        axes: logical axes of w: under a mesh its codes are gathered over those of its mesh axes
            that divide the batch. None: the compiler lays them out.

    Returns:
        y [*rows, *out] in the dtype of x. Sums of int8 codes are exact; a number that is not finite
        makes its row or its output not finite.

    Raises:
        KernelError: an unknown scheme, shapes that do not fit together, or sums of int8 codes that
            are too long for int32.
    """
    if scheme not in PRODUCT_SCHEMES:
        raise KernelError(
            f"quantized_linear: the scheme {scheme!r} is not known; use one of "
            f"{', '.join(PRODUCT_SCHEMES)}"
        )
    if not 0 < inputs <= min(x.ndim, w.ndim) or x.shape[-inputs:] != w.shape[:inputs]:
        raise KernelError(
            f"quantized_linear: the last {inputs} axes of x{x.shape} must equal the first {inputs} "
            f"of w{w.shape}"
        )
    longest = max(math.prod(w.shape[:inputs]), math.prod(w.shape[inputs:]))
    if PRODUCT_SCHEMES[scheme].sums == jnp.int32 and longest > _LONGEST:
        raise KernelError(
            f"quantized_linear: w{w.shape} has {longest} inputs or outputs, and int32 has room for "
            f"sums of {_LONGEST} products of int8 codes; use fp8"
        )
    call = _Call(scheme, inputs, None if axes is None else tuple(axes))
    return _linear(call, x, w, noise)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _linear(call: _Call, x: jax.Array, w: jax.Array, noise: jax.Array) -> jax.Array:
    del noise
    return _product(call, _code_rows(call, x), _code_weight(call, w), x.dtype)


def _linear_jvp(call: _Call, primals: Any, tangents: Any) -> tuple[jax.Array, object]:
    x, w, noise = primals
    dx, dw, _ = tangents
    x_codes, w_codes = _code_rows(call, x), _code_weight(call, w)
    y = checkpoint_name(_product(call, x_codes, w_codes, x.dtype), LINEAR_OUTPUT)
    parts = []
    if not isinstance(dx, SymbolicZero):
        parts.append(_of_x.bind(dx, *w_codes, noise, call=call))
    if not isinstance(dw, SymbolicZero):
        parts.append(_of_w.bind(dw, *x_codes, noise, call=call, dtype=x.dtype))
    return y, sum(parts[1:], parts[0]) if parts else jnp.zeros_like(y)


_linear.defjvp(_linear_jvp, symbolic_zeros=True)


def _code_rows(call: _Call, x: jax.Array) -> _Codes:
    return _code(x, range(x.ndim - call.inputs, x.ndim), PRODUCT_SCHEMES[call.scheme].values)


def _code_weight(call: _Call, w: jax.Array) -> _Codes:
    """The codes of w where it lies."""
    codes = _code(w, range(call.inputs), PRODUCT_SCHEMES[call.scheme].values)
    return codes if call.axes is None else codes._replace(values=constrain(codes.values, call.axes))


def _gathered(call: _Call, codes: _Codes) -> _Codes:
    """The codes of w where they are multiplied."""
    if call.axes is None:
        return codes
    rules = current_rules()
    axes = [
        axis if axis is None or not {*rules[axis]} & {*rules["batch"]} else None
        for axis in call.axes
    ]
    return _Codes(constrain(codes.values, axes), constrain(codes.scale, axes[call.inputs :]))


@jax.named_scope("quantize")
def _code(
    x: jax.Array, shared: Sequence[int], dtype: DTypeLike, noise: jax.Array | None = None
) -> _Codes:
    """Round to codes whose largest stands for the largest magnitude along the axes `shared`.

    Args:
        x: floats.
        shared: axes along which elements have one scale.
        dtype: of the codes.
        noise: uint32 random bits for each element; None rounds to the nearest.
    """
    x, shared = x.astype(jnp.float32), tuple(shared)
    is_integer = jnp.issubdtype(dtype, jnp.integer)
    largest = 127.0 if is_integer else float(jnp.finfo(dtype).max)
    scale = jnp.max(jnp.abs(x), axis=shared, keepdims=True) / largest
    steps = jnp.clip(x / jnp.where(scale > 0, scale, 1), -largest, largest)
    if noise is not None:
        steps = _round_stochastically(steps, noise, dtype)
    elif is_integer:
        steps = jnp.round(steps)
    return _Codes(steps.astype(dtype), jnp.squeeze(scale, shared))


def _round_stochastically(x: jax.Array, noise: jax.Array, dtype: DTypeLike) -> jax.Array:
    """A neighbour of each number among those of `dtype`, with that number as its expectation."""
    unit: jax.Array | float = 1.0
    if not jnp.issubdtype(dtype, jnp.integer):
        info = jnp.finfo(dtype)
        exponent = (lax.bitcast_convert_type(x, jnp.uint32) >> 23) & 255
        exponent = jnp.maximum(exponent, 127 + info.minexp) - info.nmant
        unit = lax.bitcast_convert_type(exponent << 23, jnp.float32)
    up = (noise >> 8).astype(jnp.float32) * 2.0**-24
    most = 127.0 if jnp.issubdtype(dtype, jnp.integer) else float(jnp.finfo(dtype).max)
    return jnp.clip(jnp.floor(x / unit + up) * unit, -most, most)


def _product(call: _Call, x: _Codes, w: _Codes, dtype: DTypeLike) -> jax.Array:
    """The product of what codes stand for."""
    w = _gathered(call, w)
    lead = x.scale.ndim
    axes = tuple(range(lead, x.values.ndim)), tuple(range(call.inputs))
    sums = _sum(call, x.values, w.values, axes)
    return (sums * _before(x.scale, w.scale.ndim) * w.scale).astype(dtype)


def _sum(
    call: _Call,
    a: jax.Array,
    b: jax.Array,
    axes: tuple[Any, Any],
    batch: tuple[Any, Any] = ((), ()),
) -> jax.Array:
    """Sums of products of codes, float32."""
    sums = PRODUCT_SCHEMES[call.scheme].sums
    found = lax.dot_general(a, b, (axes, batch), preferred_element_type=sums)
    return found.astype(jnp.float32)


def _before(scale: jax.Array, trailing: int) -> jax.Array:
    return scale.reshape(*scale.shape, *(1,) * trailing)


def _once(gradient: Any) -> Any:
    """`gradient`, static in its first two arguments, that is not differentiated: what it rounds
    would count as constants."""

    def refuse(call: _Call, dtype: Any, primals: Any, tangents: Any) -> Any:
        raise KernelError(
            f"quantized_linear: the gradient of products in {call.scheme} has no derivative; "
            "multiply in float32 for second derivatives"
        )

    once = jax.custom_jvp(gradient, nondiff_argnums=(0, 1))
    once.defjvp(refuse)
    return once


@_once
def _x_gradient(
    call: _Call,
    dtype: DTypeLike,
    dy: jax.Array,
    values: jax.Array,
    scale: jax.Array,
    noise: jax.Array,
) -> jax.Array:
    """dx, given the codes of w where it lies."""
    w = _gathered(call, _Codes(values, scale))
    lead, gradients = dy.ndim - w.scale.ndim, PRODUCT_SCHEMES[call.scheme].gradients
    bits = index_noise(dy.shape, noise, 0)
    g = _code(dy.astype(jnp.float32) * w.scale, range(lead, dy.ndim), gradients, bits)
    axes = tuple(range(lead, dy.ndim)), tuple(range(call.inputs, values.ndim))
    return (_sum(call, g.values, w.values, axes) * _before(g.scale, call.inputs)).astype(dtype)


@_once
def _w_gradient(
    call: _Call,
    dtype: DTypeLike,
    dy: jax.Array,
    values: jax.Array,
    scale: jax.Array,
    noise: jax.Array,
) -> jax.Array:
    """dw, given the codes of x."""
    lead = scale.ndim
    bits = index_noise(dy.shape, noise, 1)
    scaled = dy.astype(jnp.float32) * _before(scale, dy.ndim - lead)
    g = _code(scaled, range(lead), PRODUCT_SCHEMES[call.scheme].gradients, bits)
    parts = _parts(call, dy.shape[:lead])
    if parts == 1:
        rows = tuple(range(lead))
        return (_sum(call, values, g.values, (rows, rows)) * g.scale).astype(dtype)
    # Each device's codes are summed in int32, and these sums in float32.
    rows, of_parts = tuple(range(1, lead + 1)), ((0,), (0,))
    sums = _sum(call, _split(values, parts), _split(g.values, parts), (rows, rows), of_parts)
    return (jnp.sum(sums, axis=0) * g.scale).astype(dtype)


def _x_cotangent(dy: Any, dx: Any, *of_w: jax.Array, call: _Call) -> list[Any]:
    zero = isinstance(dy, ad.Zero)
    of = dx.aval
    return [ad.Zero(of) if zero else _x_gradient(call, of.dtype, dy, *of_w), None, None, None]


def _w_cotangent(dy: Any, dw: Any, *of_x: jax.Array, call: _Call, dtype: DTypeLike) -> list[Any]:
    del dtype
    zero = isinstance(dy, ad.Zero)
    of = dw.aval
    return [ad.Zero(of) if zero else _w_gradient(call, of.dtype, dy, *of_x), None, None, None]


def _parts(call: _Call, rows: tuple[int, ...]) -> int:
    """Parts of the rows, of equal size, that are summed apart: no fewer than the devices that
    divide them, and short enough for their sums."""
    if PRODUCT_SCHEMES[call.scheme].sums != jnp.int32 or not rows:
        return 1
    devices = shards(dividing("batch", rows[0]))
    fits = (
        parts
        for parts in range(devices, rows[0] + 1, devices)
        if rows[0] % parts == 0 and math.prod(rows) // parts <= _LONGEST
    )
    parts = next(fits, None)
    if parts is None:
        raise KernelError(
            f"quantized_linear: rows of {math.prod(rows[1:])} tokens are summed over, and int32 "
            f"has room for sums of {_LONGEST} products of int8 codes; use shorter rows, or fp8"
        )
    return parts


def _split(rows: jax.Array, parts: int) -> jax.Array:
    """[B, ...] to [parts, B / parts, ...], each device's rows its own."""
    return rows.reshape(parts, -1, *rows.shape[1:])


def _tangent_of_x(
    dx: jax.Array, values: jax.Array, scale: jax.Array, noise: jax.Array, *, call: _Call
) -> jax.Array:
    del noise
    w = values.astype(jnp.float32) * scale
    return jnp.tensordot(dx.astype(jnp.float32), w, call.inputs).astype(dx.dtype)


def _tangent_of_w(
    dw: jax.Array,
    values: jax.Array,
    scale: jax.Array,
    noise: jax.Array,
    *,
    call: _Call,
    dtype: DTypeLike,
) -> jax.Array:
    del noise
    x = values.astype(jnp.float32) * _before(scale, call.inputs)
    return jnp.tensordot(x, dw.astype(jnp.float32), call.inputs).astype(dtype)


def _primitive(name: str, formula: Any, cotangent: Any) -> Primitive:
    """Linear in its first argument, whose transpose is not that of `formula` but rounds."""
    primitive = Primitive(name)
    primitive.def_impl(formula)
    primitive.def_abstract_eval(lambda *arrays, **static: _abstract(formula, arrays, static))
    mlir.register_lowering(primitive, mlir.lower_fun(formula, multiple_results=False))
    ad.primitive_transposes[primitive] = cotangent
    return primitive


def _abstract(formula: Any, arrays: Any, static: Any) -> Any:
    shapes = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in arrays]
    found = jax.eval_shape(functools.partial(formula, **static), *shapes)
    return jax.core.ShapedArray(found.shape, found.dtype)


_of_x = _primitive("quantized_linear_of_x", _tangent_of_x, _x_cotangent)
_of_w = _primitive("quantized_linear_of_w", _tangent_of_w, _w_cotangent)
