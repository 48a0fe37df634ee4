"""Packed weights by the native CPU kernel (`_native/linear.cc`).

Legend: L layers, M rows, K inputs, N outputs, P panels of 32 outputs, U words of 4 bytes that hold
1, 2 or 4 inputs, G groups of 64 inputs.
"""

import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from fornax.kernels import _native
from fornax.kernels._packed.plain import GROUP, quantize

__all__ = ["layout", "linear", "linears", "unavailable", "unpack"]

_PANEL = 32
"""Outputs of a panel; the kernel has the same number."""


def unavailable() -> str | None:
    """Say why the kernel cannot be used."""
    return _native.unavailable("linear")


def layout(w_LKN: jax.Array, precision: str) -> tuple[jax.Array, jax.Array | None]:
    """Return the values [L, P, U, 32, inputs of a word], and for int8 the scales [L, P, G, 32].

    float32 and bfloat16 as they are, int8 as uint8 with 128 added. Inputs and outputs that fill up
    a word, a group or a panel are zeros.
    """
    if precision == "float32":
        return _panels(w_LKN.astype(jnp.float32), 1), None
    if precision == "bfloat16":
        return _panels(w_LKN.astype(jnp.bfloat16), 2), None
    values, scales = quantize(w_LKN)
    values = jnp.pad(values, ((0, 0), (0, -values.shape[1] % GROUP), (0, 0)))
    unsigned = (values.astype(jnp.int16) + 128).astype(jnp.uint8)
    return _panels(unsigned, 4), _panels(scales, 1)[..., 0]


def linear(
    x_MK: jax.Array, values: jax.Array, scales: jax.Array | None, layer: jax.Array, outputs: int
) -> jax.Array:
    """Return y [M, N] in the dtype of x."""
    return linears(x_MK, [(values, scales, layer, outputs)])[0]


def linears(
    x_MK: jax.Array, weights: Sequence[tuple[jax.Array, jax.Array | None, jax.Array, int]]
) -> list[jax.Array]:
    """Return y [M, N] for each of several weights of one precision, in one call.

    A weight is what `linear` takes: values, scales, layer, outputs.
    """
    shapes = [(x_MK.shape[0], outputs) for *_, outputs in weights]
    if 0 in x_MK.shape or any(0 in shape for shape in shapes):
        return [jnp.zeros(shape, x_MK.dtype) for shape in shapes]
    results = [jax.ShapeDtypeStruct(shape, x_MK.dtype) for shape in shapes]
    call = jax.ffi.ffi_call("fornax_linear", results, vmap_method="sequential")
    arrays = [(v, jnp.zeros((0,)) if s is None else s, layer) for v, s, layer, _ in weights]
    return list(call(x_MK, *itertools.chain.from_iterable(arrays)))


def unpack(values: jax.Array, scales: jax.Array | None, inputs: int, outputs: int) -> jax.Array:
    """Return the values as float32 [L, K, N]."""
    w_LKN = _rows(values)
    if scales is not None:
        wide = jnp.repeat(_rows(scales[..., None]), GROUP, axis=1)
        w_LKN = (w_LKN.astype(jnp.float32) - 128) * wide
    return w_LKN[:, :inputs, :outputs].astype(jnp.float32)


def _panels(w_LKN: jax.Array, inputs: int) -> jax.Array:
    """Return [L, P, U, 32, inputs of a word]."""
    L, K, N = w_LKN.shape
    padded = jnp.pad(w_LKN, ((0, 0), (0, -K % inputs), (0, -N % _PANEL)))
    return padded.reshape(L, -(-K // inputs), inputs, -1, _PANEL).transpose(0, 3, 1, 4, 2)


def _rows(panels: jax.Array) -> jax.Array:
    """Undo `_panels`: return [L, K, N], padding included."""
    L, P, U, _, inputs = panels.shape
    return panels.transpose(0, 2, 4, 1, 3).reshape(L, U * inputs, P * _PANEL)
