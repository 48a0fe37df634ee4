"""Packing: choose who will run the products of a weight, and lay it out for them."""

import functools
import math
from typing import Literal

import jax
import jax.numpy as jnp

from fornax.config.errors import KernelError
from fornax.kernels._packed import native, plain
from fornax.kernels._packed.formats import FORMATS, Parts, Precision, group_of, quantize
from fornax.kernels._packed.weight import PackedWeight
from fornax.kernels.registry import current_platform
from fornax.mesh import current_mesh

__all__ = ["pack"]


def pack(
    w: jax.Array,
    *,
    inputs: int = 1,
    precision: Precision = "float32",
    group: int | None = None,
    stacked: bool = False,
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
        w: [*in, *out], or [L, *in, *out] if stacked; any floating dtype.
        inputs: how many axes of a layer are summed over.
        precision: how values are stored and multiplied.
        group: inputs that share a scale; None for what the table says. The last group of an output
            may have fewer.
        stacked: whether the first axis is layers.
        implementation: "native" is the C++ kernel on CPU, "plain" is XLA's; None for the native one
            where it runs.

    Returns:
        A weight for `kernels.linear`.

    Raises:
        KernelError: an unknown precision or group, axes that do not fit, or an implementation that
            declines.
    """
    group = group_of(precision, group)
    first = 1 if stacked else 0
    if not 0 < inputs < w.ndim - first or 0 in w.shape:
        raise KernelError(
            f"pack: w{w.shape} with inputs={inputs}, stacked={stacked} leaves no outputs or is "
            f"empty; give [{'L, ' if stacked else ''}*in, *out]"
        )
    sizes_in, sizes_out = w.shape[first : first + inputs], w.shape[first + inputs :]
    w_LKN = w.reshape(-1, math.prod(sizes_in), math.prod(sizes_out))
    chosen = _choose(w, implementation)
    parts = _lay_out(w_LKN, precision, group, chosen)
    return PackedWeight(
        **parts._asdict(),
        layer=None,
        precision=precision,
        group=group,
        implementation=chosen,
        inputs=sizes_in,
        outputs=sizes_out,
        dtype=jnp.dtype(w.dtype),
        stacked=stacked,
    )


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _lay_out(
    w_LKN: jax.Array, precision: Precision, group: int | None, implementation: str
) -> Parts:
    """Lay out as one compiled program: op by op it would take several times as long."""
    if precision in FORMATS:
        parts = quantize(w_LKN, precision, group)
    else:
        parts = Parts(w_LKN.astype(precision))
    if implementation == "native":
        return native.layout(parts, precision, group)
    return plain.layout(parts, precision)


def _choose(w: jax.Array, wanted: str | None) -> Literal["native", "plain"]:
    if wanted not in (None, "native", "plain"):
        raise KernelError(f"implementation={wanted!r} is unknown; use native or plain")
    if wanted == "plain":
        return "plain"
    reason = _declines(w)
    if reason is None:
        return "native"
    if wanted == "native":
        raise KernelError(
            f"pack: implementation='native' declines: {reason}; leave implementation out"
        )
    return "plain"


def _declines(w: jax.Array) -> str | None:
    """Say why the native kernel cannot take `w`."""
    if current_platform() != "cpu":
        return f"it runs on cpu, not on {current_platform()}"
    mesh = current_mesh()
    if mesh is not None and mesh.size > 1:
        return f"the mesh in use has {mesh.size} devices"
    if not isinstance(w, jax.core.Tracer) and len(w.devices()) > 1:
        return f"the weight lies on {len(w.devices())} devices"
    return native.unavailable()
