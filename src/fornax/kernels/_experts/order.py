"""The order in which rows of groups lie one group after the other.

Legend: A rows, E groups.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fornax.config.errors import KernelError
from fornax.kernels._experts import native

__all__ = ["GroupOrder", "sort_by_group"]


class GroupOrder(NamedTuple):
    """Rows sorted by group."""

    order_A: jax.Array
    """int32: which row comes at each place."""
    inverse_A: jax.Array
    """int32: at which place each row comes."""
    sizes_E: jax.Array
    """int32: rows of each group, as `grouped_matmul` takes them."""


def sort_by_group(groups_A: jax.Array, num_groups: int) -> GroupOrder:
    """Return the order of rows by group, in their own order within one; those of no group last.

    On one CPU rows are counted and put in their places, without a sort. Elsewhere, without a C++
    compiler and for a number of rows that is open in an exported function, XLA sorts.

    Args:
        groups_A: int32, each row's group; `num_groups` for none.
        num_groups: E.

    Raises:
        KernelError: `groups_A` is not one axis of int32.
    """
    if groups_A.ndim != 1 or groups_A.dtype != jnp.int32:
        raise KernelError(
            f"sort_by_group: groups{groups_A.shape} of {groups_A.dtype} must be one axis of int32"
        )
    if not native.takes(groups_A):
        order_A = jnp.argsort(groups_A, stable=True)
        # Counted, as a search refuses a number of rows that is open.
        sizes_E = jnp.sum(groups_A[:, None] == jnp.arange(num_groups), axis=0, dtype=jnp.int32)
        return GroupOrder(order_A, jnp.argsort(order_A), sizes_E)
    rows = jax.ShapeDtypeStruct(groups_A.shape, jnp.int32)
    sizes = jax.ShapeDtypeStruct((num_groups,), jnp.int32)
    call = jax.ffi.ffi_call("fornax_group_order", (rows, rows, sizes), vmap_method="sequential")
    return GroupOrder(*call(groups_A))
