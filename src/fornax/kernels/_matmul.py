"""Products of matrices by the native CPU kernels `matmul.cc` and `float32_matmul.cc`.

XLA's CPU backend repacks bfloat16 operands and starts its own threads in each product: a small
model's reach a quarter of what these do. `matmul.cc` needs AVX512-BF16, and uses AMX tiles where
there are any. `float32_matmul.cc` multiplies bfloat16 matrices for every other processor with AVX2.
In float32 XLA's products are as fast as the processor with AVX-512, but those with a transposed
left operand, which it copies ahead; with AVX2 alone those of `float32_matmul.cc` take a tenth to a
third less time, and copy none ahead.

Legend: M rows, K summed over, N columns.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.typing import DTypeLike

from fornax.kernels import _native
from fornax.kernels.registry import current_platform
from fornax.mesh import current_mesh

__all__ = [
    "LEAST",
    "LEFT_TRANSPOSED",
    "PLAIN",
    "RIGHT_TRANSPOSED",
    "matmul",
    "on_one_cpu",
    "orthogonalize",
    "round_operand",
    "runs",
    "unit_of",
]

PLAIN, RIGHT_TRANSPOSED, LEFT_TRANSPOSED = 0, 1, 2
"""a b, a b^T, a^T b; the kernel has the same numbers."""

_FEWEST = 16
"""Rows, columns or elements of a sum below which a tile is mostly padding."""

_AXES = {PLAIN: ((1,), (0,)), RIGHT_TRANSPOSED: ((1,), (1,)), LEFT_TRANSPOSED: ((0,), (0,))}


LEAST = 1 << 22
"""Multiplications of a product in float32 below which the call costs what the kernel gains."""


def on_one_cpu() -> bool:
    """Whether arrays lie on one device, a CPU."""
    mesh = current_mesh()
    return current_platform() == "cpu" and (mesh is None or mesh.size == 1)


def _available(unit: str | None) -> bool:
    """Whether a unit's kernels run in this process, for arrays that lie on one device."""
    return unit is not None and on_one_cpu() and _native.unavailable(unit) is None


def unit_of(dtype: DTypeLike, form: int = PLAIN) -> str | None:
    """The unit that multiplies matrices of this dtype on this processor; None where XLA does."""
    if jnp.dtype(dtype) == jnp.bfloat16 and _has_bfloat16():
        return "matmul"
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float32):
        return None
    xla = jnp.dtype(dtype) == jnp.float32 and form != LEFT_TRANSPOSED
    if not _native.has_features("avx2", "fma") or (xla and _native.has_features("avx512f")):
        return None
    return "float32_matmul"


def _has_bfloat16() -> bool:
    return _native.has_features("avx512_bf16", "avx512bw", "avx512vl")


def runs(dtype: DTypeLike, *sizes: int, form: int = PLAIN) -> bool:
    """Whether a kernel multiplies matrices of this dtype with sides M, N and K in this form."""
    unit = unit_of(dtype, form)
    large = min(sizes) >= _FEWEST and (unit == "matmul" or math.prod(sizes) >= LEAST)
    return large and _available(unit)


def matmul(a: jax.Array, b: jax.Array, form: int, dtype: DTypeLike) -> jax.Array:
    """Multiply two matrices of one dtype, summing in float32; call it only where it `runs`.

    Args:
        a: [M, K]; [K, M] where it is transposed.
        b: [K, N]; [N, K] where it is transposed.
        form: `PLAIN`, `RIGHT_TRANSPOSED` or `LEFT_TRANSPOSED`.
        dtype: of the result [M, N], float32 or, of bfloat16 matrices, bfloat16.
    """
    return _matmul.bind(a, b, form=form, dtype=jnp.dtype(dtype))


def _plain(a: jax.Array, b: jax.Array, *, form: int, dtype: Any) -> jax.Array:
    wide = jnp.promote_types(jnp.promote_types(a.dtype, b.dtype), jnp.float32)
    axes = (_AXES[form], ((), ()))
    return lax.dot_general(a, b, axes, preferred_element_type=wide).astype(dtype)


def _native_call(a: jax.Array, b: jax.Array, *, form: int, dtype: Any) -> jax.Array:
    result = jax.ShapeDtypeStruct(_shape(a, b, form), dtype)
    halves = a.dtype == jnp.bfloat16 and _has_bfloat16()
    target = "fornax_matmul" if halves else "fornax_float32_matmul"
    return jax.ffi.ffi_call(target, result)(a, b, form=np.int64(form))


def _shape(a: Any, b: Any, form: int) -> tuple[int, int]:
    (of_a,), (of_b,) = _AXES[form]
    return a.shape[1 - of_a], b.shape[1 - of_b]


def _again(a: jax.Array, b: jax.Array, form: int, dtype: Any) -> jax.Array:
    """A product of a cotangent, which is float32 where the product's result was."""
    if a.dtype == b.dtype:
        return matmul(a, b, form, dtype)
    return _plain(a, b, form=form, dtype=dtype)


def _a_cotangent(dc: jax.Array, a: Any, b: jax.Array, *, form: int, dtype: Any) -> jax.Array:
    del dtype
    of = a.aval.dtype
    if form == LEFT_TRANSPOSED:
        return _again(b, dc, RIGHT_TRANSPOSED, of)
    return _again(dc, b, RIGHT_TRANSPOSED if form == PLAIN else PLAIN, of)


def _b_cotangent(dc: jax.Array, a: jax.Array, b: Any, *, form: int, dtype: Any) -> jax.Array:
    del dtype
    of = b.aval.dtype
    if form == RIGHT_TRANSPOSED:
        return _again(dc, a, LEFT_TRANSPOSED, of)
    return _again(a, dc, LEFT_TRANSPOSED if form == PLAIN else PLAIN, of)


def _batch(arrays: Any, dims: Any, *, form: int, dtype: Any) -> tuple[jax.Array, int]:
    plain = functools.partial(_plain, form=form, dtype=dtype)
    return jax.vmap(plain, in_axes=tuple(dims))(*arrays), 0


_matmul = Primitive("native_matmul")
_matmul.def_impl(jax.jit(_native_call, static_argnames=("form", "dtype")))
_matmul.def_abstract_eval(
    lambda a, b, *, form, dtype: jax.core.ShapedArray(_shape(a, b, form), dtype)
)
mlir.register_lowering(_matmul, mlir.lower_fun(_native_call, multiple_results=False), "cpu")
mlir.register_lowering(_matmul, mlir.lower_fun(_plain, multiple_results=False))
ad.defbilinear(_matmul, _a_cotangent, _b_cotangent)
batching.primitive_batchers[_matmul] = _batch


def round_operand(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """x rounded to `dtype`, to be multiplied by XLA: in float32 where that is faster.

    Products of bfloat16 matrices take XLA half as long again as those of float32 on a processor
    without instructions for them.
    """
    if jnp.dtype(dtype) != jnp.bfloat16 or current_platform() != "cpu" or _has_bfloat16():
        return x.astype(dtype)
    return lax.reduce_precision(x.astype(jnp.float32), exponent_bits=8, mantissa_bits=7)


_LARGEST = 1 << 19
"""Elements of a matrix that one thread orthogonalizes in its second cache."""


def orthogonalize(
    x_BRC: jax.Array, coefficients: tuple[tuple[float, float, float], ...], *, eps: float
) -> jax.Array | None:
    """Newton-Schulz iterations of matrices divided by their Frobenius norm, or None.

    Each is x <- a x + (b g + c g g) x with g = x x^T on the shorter side. Operands of products are
    bfloat16; sums, x and g are float32. Symmetric products are computed by half.

    Args:
        x_BRC: float32 [..., R, C].
        coefficients: (a, b, c) of each iteration.
        eps: added to the norm.

    Returns:
        float32 [..., R, C]; None where the kernel does not run or XLA would be faster.
    """
    *batch, R, C = x_BRC.shape
    fits = min(R, C) >= _FEWEST and R * C <= _LARGEST and 0 not in batch
    if x_BRC.dtype != jnp.float32 or not fits:
        return None
    if not (_has_bfloat16() and _available("matmul")):
        return None
    call = jax.ffi.ffi_call(
        "fornax_orthogonalize",
        jax.ShapeDtypeStruct(x_BRC.shape, jnp.float32),
        vmap_method="expand_dims",
    )
    flat = np.asarray(coefficients, np.float32).reshape(-1)
    return call(x_BRC, coefficients=flat, eps=np.float32(eps))
