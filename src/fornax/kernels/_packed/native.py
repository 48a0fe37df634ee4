"""Packed weights by the native CPU kernels (`_native/linear.cc`, `_native/packed_experts.cc`).

Legend: L layers, M rows, E groups of rows, K inputs, N outputs, P panels of 32 outputs, U words of
4 bytes that hold 1, 2, 4 or 8 inputs of an output, G groups of inputs.
"""

import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fornax.kernels import _native
from fornax.kernels._packed.formats import Parts, Precision

__all__ = ["codes", "filled", "grouped", "layout", "linears", "unavailable"]

_PANEL = 32
"""Outputs of a panel; the kernel has the same number."""

_ORDERS: dict[Precision, tuple[int, ...]] = {
    "float32": (0,),
    "bfloat16": (0, 1),
    "int8": (0, 1, 2, 3),
    "int4": (0, 4, 1, 5, 2, 6, 3, 7),
    "fp8": (0, 2, 1, 3),
    "mxfp4": (0, 4, 2, 6, 1, 5, 3, 7),
}
"""Which input of a word lies where; the first of two codes of 4 bits is a byte's lower half."""


def unavailable(*, experts: bool = False) -> str | None:
    """Say why the kernel, or that of experts, cannot be used."""
    return _native.unavailable("packed_experts" if experts else "linear")


def layout(given: Parts, precision: Precision, group: int | None) -> Parts:
    """Return values [L, P, U, 32, bytes or floats of a word], scales and zeros [L, P, G, 32].

    Codes of few bits are bytes, of 4 bits two to a byte; int8 has 128 added. What fills up a word,
    a group or a panel is zeros, which no input of a row is multiplied with.
    """
    values, order = given.values, np.array(_ORDERS[precision])
    if precision == "int8":
        values = (values.astype(jnp.int16) + 128).astype(jnp.uint8)
    elif precision == "fp8":
        values = lax.bitcast_convert_type(values, jnp.uint8)
    filled = jnp.pad(values, ((0, 0), (0, -values.shape[1] % (group or len(order))), (0, 0)))
    words = _panels(filled, len(order))[..., order]
    if len(order) == 8:
        words = words[..., ::2] | (words[..., 1::2] << 4)
    return Parts(words, *(None if each is None else _grouped(each) for each in given[1:]))


def codes(parts: Parts, precision: Precision, inputs: int, outputs: int) -> Parts:
    """Undo `layout`: return values [L, K, N], scales and zeros [L, G, N]."""
    words, order = parts.values, _ORDERS[precision]
    if len(order) == 8:
        words = jnp.stack([words & 15, words >> 4], axis=-1).reshape(*words.shape[:-1], 8)
    values = _rows(words[..., np.argsort(order)])[:, :inputs, :outputs]
    if precision == "int8":
        values = (values.astype(jnp.int16) - 128).astype(jnp.int8)
    elif precision == "fp8":
        values = lax.bitcast_convert_type(values, jnp.float8_e4m3fn)
    shared = (each if each is None else _rows(each[..., None]) for each in parts[1:])
    return Parts(values, *(each if each is None else each[:, :, :outputs] for each in shared))


def linears(
    x_MK: jax.Array,
    weights: Sequence[tuple[Parts, jax.Array | None, jax.Array, int]],
    precision: Precision,
) -> list[jax.Array]:
    """Return y [M, N] in the dtype of x for each of several weights, in one call.

    A weight is its parts, the order of its inputs [L, K] or None, the layer of both, and its
    outputs; all have groups of one size.
    """
    shapes = [(x_MK.shape[0], outputs) for *_, outputs in weights]
    if 0 in x_MK.shape or any(0 in shape for shape in shapes):
        return [jnp.zeros(shape, x_MK.dtype) for shape in shapes]
    results = [jax.ShapeDtypeStruct(shape, x_MK.dtype) for shape in shapes]
    call = jax.ffi.ffi_call("fornax_linear", results, vmap_method="sequential")
    unordered = jnp.zeros((0,), jnp.int32)
    arrays = [
        (*filled(parts), unordered if order is None else order, layer)
        for parts, order, layer, _ in weights
    ]
    return list(call(x_MK, *itertools.chain.from_iterable(arrays), precision=precision))


def grouped(
    x_MK: jax.Array,
    parts: Parts,
    sizes_E: jax.Array,
    layer: jax.Array,
    outputs: int,
    precision: Precision,
) -> jax.Array:
    """Return y [M, N] in the dtype of x: rows of each group by its matrix of [L, E, ...]."""
    y_MN = jax.ShapeDtypeStruct((x_MK.shape[0], outputs), x_MK.dtype)
    call = jax.ffi.ffi_call("fornax_packed_grouped_matmul", y_MN, vmap_method="sequential")
    return call(x_MK, *filled(parts), sizes_E, layer, precision=precision)


def filled(parts: Parts) -> tuple[jax.Array, ...]:
    """Return the arrays, an empty one for what there is not."""
    none = jnp.zeros((0,), jnp.uint8)
    return tuple(none if each is None else each for each in parts)


def _grouped(each_LGN: jax.Array) -> jax.Array:
    """Return [L, P, G, 32]."""
    return _panels(each_LGN, 1)[..., 0]


def _panels(w_LKN: jax.Array, inputs: int) -> jax.Array:
    """Return [L, P, U, 32, inputs of a word]."""
    L, K, N = w_LKN.shape
    padded = jnp.pad(w_LKN, ((0, 0), (0, -K % inputs), (0, -N % _PANEL)))
    return padded.reshape(L, -(-K // inputs), inputs, -1, _PANEL).transpose(0, 3, 1, 4, 2)


def _rows(panels: jax.Array) -> jax.Array:
    """Undo `_panels`: return [L, K, N], padding included."""
    L, P, U, _, inputs = panels.shape
    return panels.transpose(0, 2, 4, 1, 3).reshape(L, U * inputs, P * _PANEL)
