"""Few rows times a matrix of each of several layers: what the modulations of a transformer's blocks
take, if they are made for all blocks at once.

In a loop over layers each matrix is copied out of its stack for a product that reads it once, and
its gradient is copied into a stack of zeros. Natively on one CPU the stack is read, and the
gradient written, in place.

Legend: L layers, M rows, K inputs, N outputs.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.typing import DTypeLike

from fornax.config.errors import KernelError
from fornax.kernels import _matmul, _native

__all__ = ["few_rows_linear", "runs_few_rows"]

_MOST = 15
"""Rows from which on products are worth packing a matrix for."""


def runs_few_rows(rows: int, dtype: DTypeLike, w: object) -> bool:
    """Whether the native kernel multiplies so many rows of this dtype with `w`, an array [L, K, N]
    on one CPU."""
    kinds = (jnp.float32, jnp.bfloat16)
    fits = isinstance(w, jax.Array) and w.dtype in kinds and jnp.dtype(dtype) in kinds
    few = rows <= _MOST
    return fits and few and _matmul.on_one_cpu() and _native.unavailable("few_rows") is None


def few_rows_linear(x: jax.Array, w: jax.Array) -> jax.Array:
    """Multiply rows of each layer with its matrix; call it only where it `runs_few_rows`.

    Args:
        x: float32 or bfloat16 [L, M, K].
        w: float32 or bfloat16 [L, K, N], rounded to the dtype of x where it is read.

    Returns:
        y [L, M, N] in the dtype of x; sums are float32, and the gradient of w is not rounded.

    Raises:
        KernelError: shapes that do not fit together.
    """
    if x.ndim != 3 or w.ndim != 3 or (x.shape[0], x.shape[2]) != w.shape[:2]:
        raise KernelError(
            f"few_rows_linear: x{x.shape} and w{w.shape} must be [L, M, K] and [L, K, N]"
        )
    return _few_rows.bind(x, w, form=_matmul.PLAIN).astype(x.dtype)


_AXES = {
    _matmul.PLAIN: (((2,), (1,)), ((0,), (0,))),
    _matmul.RIGHT_TRANSPOSED: (((2,), (2,)), ((0,), (0,))),
    _matmul.LEFT_TRANSPOSED: (((1,), (1,)), ((0,), (0,))),
}


def _plain(a: jax.Array, b: jax.Array, *, form: int) -> jax.Array:
    if form != _matmul.LEFT_TRANSPOSED and a.dtype == jnp.bfloat16:
        b = b.astype(a.dtype)
    a, b = (each.astype(jnp.float32) for each in (a, b))
    return lax.dot_general(a, b, _AXES[form], precision=lax.Precision.HIGHEST)


def _native_call(a: jax.Array, b: jax.Array, *, form: int) -> jax.Array:
    result = jax.eval_shape(lambda a, b: _plain(a, b, form=form), a, b)
    return jax.ffi.ffi_call("fornax_few_rows", result)(a, b, form=np.int64(form))


def _a_cotangent(dc: jax.Array, a: Any, b: jax.Array, *, form: int) -> jax.Array:
    of = a.aval.dtype
    if form == _matmul.LEFT_TRANSPOSED:
        return _few_rows.bind(b, dc, form=_matmul.RIGHT_TRANSPOSED).astype(of)
    # As x was: the matrix that multiplies the rows is rounded to their dtype.
    other = _matmul.RIGHT_TRANSPOSED if form == _matmul.PLAIN else _matmul.PLAIN
    return _few_rows.bind(dc.astype(of), b, form=other).astype(of)


def _b_cotangent(dc: jax.Array, a: jax.Array, b: Any, *, form: int) -> jax.Array:
    of = b.aval.dtype
    if form == _matmul.PLAIN:
        return _few_rows.bind(a, dc, form=_matmul.LEFT_TRANSPOSED).astype(of)
    if form == _matmul.RIGHT_TRANSPOSED:
        return _few_rows.bind(dc, a, form=_matmul.LEFT_TRANSPOSED).astype(of)
    return _few_rows.bind(a, dc, form=_matmul.PLAIN).astype(of)


def _batch(arrays: Any, dims: Any, *, form: int) -> tuple[jax.Array, int]:
    return jax.vmap(lambda a, b: _plain(a, b, form=form), in_axes=tuple(dims))(*arrays), 0


_few_rows = Primitive("few_rows")
"""c = a b, a b^T or a^T b of each layer in float32, linear in both; `a`, or a and b, are rows."""
_few_rows.def_impl(jax.jit(_native_call, static_argnames=("form",)))
_few_rows.def_abstract_eval(
    lambda a, b, *, form: jax.core.ShapedArray(
        jax.eval_shape(lambda a, b: _plain(a, b, form=form), a, b).shape, jnp.float32
    )
)
mlir.register_lowering(_few_rows, mlir.lower_fun(_native_call, multiple_results=False), "cpu")
mlir.register_lowering(_few_rows, mlir.lower_fun(_plain, multiple_results=False))
ad.defbilinear(_few_rows, _a_cotangent, _b_cotangent)
batching.primitive_batchers[_few_rows] = _batch
