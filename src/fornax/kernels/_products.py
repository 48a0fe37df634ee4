"""Products that add up in float32 whatever they multiply, in forms that CPUs have instructions for.

The native kernels multiply where they run. Elsewhere it is XLA, whose CPU backend left to itself
turns a bfloat16 product with a bfloat16 result into a float32 product. One with a float32 result
runs on the processor's bfloat16 units, six times as fast where it has tiles for matrices (AMX),
unless its left operand is laid out by columns.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from fornax.kernels import _matmul

__all__ = ["over_rows", "sum_products"]


def sum_products(a: jax.Array, b: jax.Array, inputs: int, *, transposed: bool = False) -> jax.Array:
    """Contract the last `inputs` axes of a with the first of b, summed in float32 at least.

    Args:
        a: [*rows, *in].
        b: [*in, *out]; [*out, *in] if `transposed`.
        inputs: how many axes are summed over.
        transposed: whether those of b are its last.

    Returns:
        [*rows, *out] in the dtype of a.
    """
    lead, outputs = a.ndim - inputs, b.ndim - inputs
    rows, out = a.shape[:lead], b.shape[:outputs] if transposed else b.shape[inputs:]
    M, K, N = math.prod(rows), math.prod(a.shape[lead:]), math.prod(out)
    form = _matmul.RIGHT_TRANSPOSED if transposed else _matmul.PLAIN
    if a.dtype == b.dtype and _matmul.runs(a.dtype, M, K, N, form=form):
        b_2 = b.reshape(N, K) if transposed else b.reshape(K, N)
        return _matmul.matmul(a.reshape(M, K), b_2, form, a.dtype).reshape(*rows, *out)
    if transposed and inputs > 1 and _matmul.on_one_cpu():
        # XLA transposes the whole of b where it sums over several of its last axes.
        a, b = a.reshape(*rows, K), b.reshape(*out, K)
        return sum_products(a, b, 1, transposed=True)
    wide = jnp.promote_types(a.dtype, jnp.float32)
    first = outputs if transposed else 0
    axes = (tuple(range(lead, a.ndim)), tuple(range(first, first + inputs)))
    return lax.dot_general(a, b, (axes, ((), ())), preferred_element_type=wide).astype(a.dtype)


def over_rows(
    a: jax.Array, b: jax.Array, rows: int = 1, dtype: DTypeLike | None = None
) -> jax.Array:
    """a^T b: contract the first `rows` axes of both.

    Args:
        a: [*rows, *m].
        b: [*rows, *n].
        rows: how many leading axes.
        dtype: of the result [*m, *n]; None for that of a. Sums are float32 at least.
    """
    m, n, R = a.shape[rows:], b.shape[rows:], math.prod(a.shape[:rows])
    M, N = math.prod(m), math.prod(n)
    result = a.dtype if dtype is None else jnp.dtype(dtype)
    fits, form = result in (a.dtype, jnp.float32), _matmul.LEFT_TRANSPOSED
    if fits and a.dtype == b.dtype and _matmul.runs(a.dtype, R, M, N, form=form):
        found = _matmul.matmul(a.reshape(R, M), b.reshape(R, N), form, result)
        return found.reshape(*m, *n)
    if rows == 1:  # of several axes XLA makes rows again; one it takes for a layout by columns
        a, b, rows = a[None], b[None], 2
    axes = tuple(range(rows))
    wide = jnp.promote_types(a.dtype, jnp.float32) if dtype is None else result
    found = lax.dot_general(a, b, ((axes, axes), ((), ())), preferred_element_type=wide)
    return found.astype(result)
