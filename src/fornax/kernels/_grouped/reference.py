"""Grouped products as their definition says: every matrix times the rows of its group alone.

Legend: M rows, E groups, K inputs, N outputs.
"""

import jax
import jax.numpy as jnp
from jax import lax

from fornax.kernels._grouped.call import GroupedInputs
from fornax.kernels._grouped.weight import GroupedWeight

__all__ = ["reference"]


def reference(inputs: GroupedInputs) -> jax.Array:
    """Multiply all rows by every matrix, in float64 for float64 inputs, else float32."""
    x_MK, w_EKN = inputs.x_MK, inputs.w_EKN
    assert not isinstance(w_EKN, GroupedWeight)
    wide = jnp.promote_types(x_MK.dtype, jnp.float32)
    rows_M, ends_E = jnp.arange(x_MK.shape[0]), jnp.cumsum(inputs.sizes_E)
    group_M1 = jnp.searchsorted(ends_E, rows_M, side="right")[:, None]

    def add(y_MN: jax.Array, group: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        index, w_KN = group
        own_M1 = group_M1 == index
        own_MK = jnp.where(own_M1, x_MK, 0).astype(wide)
        own_MN = jnp.dot(own_MK, w_KN.astype(wide), precision="highest")
        return y_MN + jnp.where(own_M1, own_MN, 0), None

    y_MN = jnp.zeros((x_MK.shape[0], w_EKN.shape[2]), wide)
    groups_E = jnp.arange(w_EKN.shape[0])
    return lax.scan(add, y_MN, (groups_E, w_EKN))[0].astype(x_MK.dtype)
