"""Packing: choose who will run the products of a weight, and lay it out for them."""

import functools
import math
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from fornax.config.errors import KernelError
from fornax.kernels._packed import native, plain
from fornax.kernels._packed.formats import FORMATS, Parts, Precision, group_of, quantize
from fornax.kernels._packed.weight import PackedWeight
from fornax.kernels.registry import current_platform
from fornax.mesh import current_mesh

__all__ = ["pack", "pack_codes"]


def pack(
    w: jax.Array,
    *,
    inputs: int = 1,
    precision: Precision = "float32",
    group: int | None = None,
    stacked: bool = False,
    experts: bool = False,
    implementation: Literal["native", "plain"] | None = None,
) -> PackedWeight:
    """Lay out a weight for products that only read it.

    "float32" stores float32, "bfloat16" bfloat16, to which x is rounded. All others store codes of
    few bits and a scale for a group of an output's inputs, the nearest to w; all sum in float32:

    | precision | code | scale | group | x |
    |---|---|---|---|---|
    | int8 | -127 to 127 | float32 | 32, 64 or 128 inputs; 64 unless said | int8 * |
    | int4 | 0 to 15, one of them is 0 | float32 | 32, 64 or 128 inputs; 64 unless said | int8 * |
    | fp8 | float8_e4m3fn | float32 | 32, 64 or 128 inputs; all unless said | bfloat16 |
    | mxfp4 | e2m1 | a power of two | 32 inputs | bfloat16 |

    * by the native kernel, each row group by group with a scale of its own, and multiplied as
    integers; the plain one widens the weight and leaves x as it is. The codes are the same.

    Args:
        w: [*in, *out], or [L, *in, *out] if stacked; of experts [E, *in, *out] or
            [L, E, *in, *out]; any floating dtype.
        inputs: how many axes of a layer are summed over.
        precision: how values are stored and multiplied.
        group: inputs that share a scale; None for what the table says. The last group of an output
            may have fewer.
        stacked: whether the first axis is layers.
        experts: whether the axis after that is matrices, one for each group of rows, of few bits.
            They are rounded one at a time.
        implementation: "native" is the C++ kernel on CPU, "plain" is XLA's; None for the native one
            where it runs.

    Returns:
        A weight for `kernels.linear`, or of experts for `kernels.grouped_matmul`.

    Raises:
        KernelError: an unknown precision or group, experts in floats, axes that do not fit, or an
            implementation that declines.
    """
    group = group_of(precision, group)
    first = stacked + experts
    if not 0 < inputs < w.ndim - first or 0 in w.shape:
        raise KernelError(
            f"pack: w{w.shape} with inputs={inputs}, stacked={stacked}, experts={experts} leaves "
            f"no outputs or is empty; give [{'L, ' * stacked}{'E, ' * experts}*in, *out]"
        )
    if experts and precision not in FORMATS:
        raise KernelError(
            f"pack: experts in {precision} are not packed; keep them as kernels.GroupedWeight, or "
            f"use one of {', '.join(FORMATS)}"
        )
    sizes_in, sizes_out = w.shape[first : first + inputs], w.shape[first + inputs :]
    w_LKN = w.reshape(-1, math.prod(sizes_in), math.prod(sizes_out))
    chosen = _choose(w, implementation, experts)
    number = w.shape[stacked] if experts else None
    parts = (_rounded_each if experts else _rounded)(w_LKN, precision, group, chosen)
    return PackedWeight(
        **_with_axis(parts, number)._asdict(),
        order=None,
        layer=None,
        precision=precision,
        group=group,
        implementation=chosen,
        inputs=sizes_in,
        outputs=sizes_out,
        dtype=jnp.dtype(w.dtype),
        stacked=stacked,
        experts=number,
    )


def pack_codes(
    values: jax.Array,
    scales: jax.Array,
    zeros: jax.Array | None = None,
    *,
    inputs: tuple[int, ...],
    outputs: tuple[int, ...],
    dtype: DTypeLike,
    precision: Precision,
    group: int | None,
    order: jax.Array | None = None,
    stacked: bool = False,
    experts: int | None = None,
    implementation: Literal["native", "plain"] | None = None,
) -> PackedWeight:
    """Lay out codes that were made before, such as those of a quantized file, as they are.

    Legend: L layers, 1 unless stacked, times experts where there are; K the product of inputs, N of
    outputs; G groups of K inputs, of which the last may have fewer. A value is
    (code - zero) x scale, in float32.

    Args:
        values: [L, K, N] codes: int8 (-128 too), uint8 from 0 to 15 for int4 and (e2m1) mxfp4, or
            float8_e4m3fn.
        scales: [L, G, N], float32, or (mxfp4) e8m0 as uint8.
        zeros: [L, G, N] uint8 from 0 to 15, the code of 0, for int4 alone.
        inputs: sizes of the axes summed over.
        outputs: sizes of the axes produced.
        dtype: of the array that the weight stands for.
        precision: one of few bits; see `pack`.
        group: inputs that share a scale: one of those that `pack` lists, or for fp8 None, all.
        order: [L, K] int32, where the matrix's inputs are in another order than those of x, such
            as that of GPTQ's activation order: which input of x is at each place, a
            permutation in each layer. Not for experts.
        stacked: whether the first axis is layers.
        experts: E, where each layer has a matrix for each group of rows.
        implementation: see `pack`.

    Returns:
        A weight for `kernels.linear`, or of experts for `kernels.grouped_matmul`.

    Raises:
        KernelError: a precision that has no codes, a group that it does not have, arrays that do
            not fit, or an implementation that declines.
    """
    if precision not in FORMATS:
        raise KernelError(
            f"precision={precision!r} has no codes; use one of {', '.join(FORMATS)}, or pack"
        )
    taken = FORMATS[precision]
    allowed = taken.groups if taken.group else (*taken.groups, None)
    if group not in allowed:
        names = ", ".join(map(str, allowed))
        raise KernelError(f"group={group} is none of {precision}'s, {names}; use one of them")
    K, N = math.prod(inputs), math.prod(outputs)
    groups = (values.shape[0] if stacked else experts or 1, -(-K // (group or K)), N)
    wanted = {
        "values": ((groups[0], K, N), _CODES[precision]),
        "scales": (groups, "uint8" if precision == "mxfp4" else "float32"),
        "zeros": (groups, "uint8") if precision == "int4" else None,
    }
    given = Parts(values, scales, zeros)
    for name, each in given._asdict().items():
        found = None if each is None else (each.shape, each.dtype.name)
        if found != wanted[name]:
            raise KernelError(
                f"pack_codes: {name} is {_said(found)}, and {_said(wanted[name])} belongs there "
                f"for {precision} with group={group}, inputs={inputs}, outputs={outputs}"
            )
    if experts is not None and (order is not None or groups[0] % experts):
        raise KernelError(
            f"pack_codes: experts={experts} take no order of inputs and divide the {groups[0]} "
            "matrices of values; give all experts of whole layers"
        )
    if order is not None and (order.shape, order.dtype) != ((groups[0], K), jnp.int32):
        raise KernelError(
            f"pack_codes: order is {_said((order.shape, order.dtype.name))}, and "
            f"{_said(((groups[0], K), 'int32'))} belongs there"
        )
    chosen = _choose(values, implementation, experts is not None)
    return PackedWeight(
        **_with_axis(_laid_out(given, precision, group, chosen), experts)._asdict(),
        order=order,
        layer=None,
        precision=precision,
        group=group,
        implementation=chosen,
        inputs=inputs,
        outputs=outputs,
        dtype=jnp.dtype(dtype),
        stacked=stacked,
        experts=experts,
    )


_CODES: dict[Precision, str] = {
    "int8": "int8",
    "int4": "uint8",
    "fp8": "float8_e4m3fn",
    "mxfp4": "uint8",
}


def _said(array: tuple[tuple[int, ...], str] | None) -> str:
    return "None" if array is None else f"{array[1]}{list(array[0])}"


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _rounded(
    w_LKN: jax.Array, precision: Precision, group: int | None, implementation: str
) -> Parts:
    """Lay out as one compiled program: op by op it would take several times as long."""
    if precision in FORMATS:
        parts = quantize(w_LKN, precision, group)
    else:
        parts = Parts(w_LKN.astype(precision))
    return _laid_out(parts, precision, group, implementation)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _rounded_each(
    w_XKN: jax.Array, precision: Precision, group: int | None, implementation: str
) -> Parts:
    """`_rounded` a matrix at a time, so that no float32 copy of all exists."""

    def one(w_KN: jax.Array) -> Parts:
        parts = _rounded(w_KN[None], precision, group, implementation)
        return jax.tree.map(lambda each: each[0], parts)

    return lax.map(one, w_XKN)


def _with_axis(parts: Parts, experts: int | None) -> Parts:
    """The arrays [L, E, ...] of [L E, ...], where there are experts."""
    if experts is None:
        return parts
    return jax.tree.map(lambda each: each.reshape(-1, experts, *each.shape[1:]), parts)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _laid_out(parts: Parts, precision: Precision, group: int | None, implementation: str) -> Parts:
    if implementation == "native":
        return native.layout(parts, precision, group)
    return plain.layout(parts, precision)


def _choose(w: jax.Array, wanted: str | None, experts: bool) -> Literal["native", "plain"]:
    if wanted not in (None, "native", "plain"):
        raise KernelError(f"implementation={wanted!r} is unknown; use native or plain")
    if wanted == "plain":
        return "plain"
    reason = _declines(w, experts)
    if reason is None:
        return "native"
    if wanted == "native":
        raise KernelError(
            f"pack: implementation='native' declines: {reason}; leave implementation out"
        )
    return "plain"


def _declines(w: jax.Array, experts: bool) -> str | None:
    """Say why the native kernel cannot take `w`."""
    if current_platform() != "cpu":
        return f"it runs on cpu, not on {current_platform()}"
    mesh = current_mesh()
    if mesh is not None and mesh.size > 1:
        return f"the mesh in use has {mesh.size} devices"
    if not isinstance(w, jax.core.Tracer) and len(w.devices()) > 1:
        return f"the weight lies on {len(w.devices())} devices"
    return native.unavailable(experts=experts)
