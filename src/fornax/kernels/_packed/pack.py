"""Packing: choose who will run the products of a weight, and lay it out for them."""

import functools
import math
from typing import Literal

import jax
import jax.numpy as jnp

from fornax.config.errors import KernelError
from fornax.kernels._packed import native, plain
from fornax.kernels._packed.weight import PackedWeight, Precision
from fornax.kernels.registry import current_platform
from fornax.mesh import current_mesh

__all__ = ["pack"]


def pack(
    w: jax.Array,
    *,
    inputs: int = 1,
    precision: Precision = "float32",
    stacked: bool = False,
    implementation: Literal["native", "plain"] | None = None,
) -> PackedWeight:
    """Lay out a weight for products that only read it.

    Precisions: "float32" stores float32. "bfloat16" stores bfloat16 and rounds x to it.
    "int8" stores 8-bit integers with a float32 scale for every 64 inputs of an output; the native
    kernel rounds x in the same way, row by row, and the plain one widens the weight. All sum in
    float32.

    Args:
        w: [*in, *out], or [L, *in, *out] if stacked; any floating dtype.
        inputs: how many axes of a layer are summed over.
        precision: how values are stored and multiplied.
        stacked: whether the first axis is layers.
        implementation: "native" is the C++ kernel on CPU, "plain" is XLA's; None for the native one
            where it runs.

    Returns:
        A weight for `kernels.linear`.

    Raises:
        KernelError: an unknown precision, axes that do not fit, or an implementation that declines.
    """
    if precision not in ("float32", "bfloat16", "int8"):
        raise KernelError(f"precision={precision!r} is unknown; use float32, bfloat16 or int8")
    first = 1 if stacked else 0
    if not 0 < inputs < w.ndim - first or 0 in w.shape:
        raise KernelError(
            f"pack: w{w.shape} with inputs={inputs}, stacked={stacked} leaves no outputs or is "
            f"empty; give [{'L, ' if stacked else ''}*in, *out]"
        )
    sizes_in, sizes_out = w.shape[first : first + inputs], w.shape[first + inputs :]
    w_LKN = w.reshape(-1, math.prod(sizes_in), math.prod(sizes_out))
    chosen = _choose(w, implementation)
    values, scales = _lay_out(w_LKN, precision, chosen)
    return PackedWeight(
        values=values,
        scales=scales,
        layer=None,
        precision=precision,
        implementation=chosen,
        inputs=sizes_in,
        outputs=sizes_out,
        dtype=jnp.dtype(w.dtype),
        stacked=stacked,
    )


@functools.partial(jax.jit, static_argnums=(1, 2))
def _lay_out(
    w_LKN: jax.Array, precision: str, implementation: str
) -> tuple[jax.Array, jax.Array | None]:
    """Lay out as one compiled program: op by op it would take several times as long."""
    layout = native.layout if implementation == "native" else plain.layout
    return layout(w_LKN, precision)


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
