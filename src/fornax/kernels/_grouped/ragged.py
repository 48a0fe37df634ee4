"""Grouped products by XLA's ragged product, with a derivative of our own.

Its own derivative of the matrices is a dense product in some compilers for TPU. On CPU every
product is dense: all rows times all matrices.

Legend: M rows, E groups, K inputs, N outputs.
"""

import jax
import jax.numpy as jnp
from jax import lax

from fornax.kernels._grouped.call import GroupedCall, GroupedProducts

__all__ = ["CONTRACTED", "declines", "own", "plain_or_transposed", "ragged_dot"]

CONTRACTED = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[],
)
"""x_e^T y_e of each group, summed over its rows."""


def declines(call: GroupedCall) -> str | None:
    """Say why XLA's ragged product is not for `call`."""
    if call.platform == "cpu":
        return "on cpu it multiplies all rows with every matrix"
    return None


def plain_or_transposed(transposed: bool) -> lax.RaggedDotDimensionNumbers:
    """Rows of each group times its matrix [K, N] or, transposed, [N, K]."""
    return lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (2 if transposed else 1,)), ((), ())),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[0],
    )


def own(rows_MX: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """Return the rows with zeros in those beyond the last group."""
    return jnp.where(jnp.arange(rows_MX.shape[0])[:, None] < jnp.sum(sizes_E), rows_MX, 0)


def _by_group(x_MK: jax.Array, w: jax.Array, sizes_E: jax.Array, transposed: bool) -> jax.Array:
    wide = jnp.promote_types(x_MK.dtype, jnp.float32)
    numbers = plain_or_transposed(transposed)
    y_MN = lax.ragged_dot_general(x_MK, w, sizes_E, numbers, preferred_element_type=wide)
    return own(y_MN, sizes_E).astype(x_MK.dtype)


def _outer(x_MK: jax.Array, y_MN: jax.Array, sizes_E: jax.Array) -> jax.Array:
    wide = jnp.promote_types(x_MK.dtype, jnp.float32)
    x_MK, y_MN = own(x_MK, sizes_E), own(y_MN, sizes_E)
    dw_EKN = lax.ragged_dot_general(x_MK, y_MN, sizes_E, CONTRACTED, preferred_element_type=wide)
    return dw_EKN.astype(x_MK.dtype)


ragged_dot = GroupedProducts(_by_group, _outer)
