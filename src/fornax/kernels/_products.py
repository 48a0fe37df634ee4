"""Products that add up in float32 whatever they multiply, in forms that XLA's CPU backend has.

Left to itself that backend turns a bfloat16 product with a bfloat16 result into a float32 product.
One with a float32 result runs on the processor's bfloat16 units, six times as fast where it has
tiles for matrices (AMX), unless its left operand is laid out by columns.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

__all__ = ["over_rows", "sum_products"]


def sum_products(
    a: jax.Array, b: jax.Array, axes: tuple[tuple[int, ...], tuple[int, ...]]
) -> jax.Array:
    """Contract `axes` of a and b, summed in float32 at least, in the dtype of a."""
    wide = jnp.promote_types(a.dtype, jnp.float32)
    return lax.dot_general(a, b, (axes, ((), ())), preferred_element_type=wide).astype(a.dtype)


def over_rows(
    a: jax.Array, b: jax.Array, rows: int = 1, dtype: DTypeLike | None = None
) -> jax.Array:
    """a^T b: contract the first `rows` axes of both.

    Args:
        a: [*rows, *m].
        b: [*rows, *n].
        rows: how many leading axes.
        dtype: of the sums and the result [*m, *n]; None for that of a, summed in float32 at least.
    """
    if rows == 1:  # of several axes XLA makes rows again; one it takes for a layout by columns
        a, b, rows = a[None], b[None], 2
    axes = tuple(range(rows))
    if dtype is None:
        return sum_products(a, b, (axes, axes))
    return lax.dot_general(a, b, ((axes, axes), ((), ())), preferred_element_type=dtype)
