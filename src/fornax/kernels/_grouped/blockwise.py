"""Grouped products a block of rows at a time in plain JAX: on any device, for any floating dtype.

A loop goes over blocks of rows, each of one group; the last of a group is filled up with rows
that are not counted. It costs a copy of a group's matrix for each block, so that it is slower
than a dense product, but its work grows with the rows and not with rows times groups.

Legend: M rows, E groups, K inputs, N outputs, B rows of a block.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fornax.kernels._grouped.call import GroupedProducts

__all__ = ["block_of", "blockwise", "over_blocks"]

_BLOCK = 128
_SMALLEST = 8
_OPEN = 32
"""Where the number of rows is open, as in an exported function."""


def over_blocks(
    sizes_E: jax.Array,
    block: int,
    start: Any,
    visit: Callable[[Any, jax.Array, jax.Array, jax.Array], Any],
) -> Any:
    """Fold `visit(carry, group, first row, rows that count [B, 1])` over the blocks in order."""
    ends_E = jnp.cumsum(sizes_E)
    blocks_E = (sizes_E + block - 1) // block
    last_E = jnp.cumsum(blocks_E)

    def step(index: jax.Array, carry: Any) -> Any:
        group = jnp.searchsorted(last_E, index, side="right")
        inside = index - (last_E[group] - blocks_E[group])
        first = ends_E[group] - sizes_E[group] + inside * block
        counts_B1 = (first + jnp.arange(block) < ends_E[group])[:, None]
        return visit(carry, group, first, counts_B1)

    return lax.fori_loop(0, last_E[-1], step, start)


def block_of(rows: int, groups: int) -> int:
    """Return the rows of a block: about those of a group, so that few are filled up."""
    if not isinstance(rows, int):
        return _OPEN
    mean = max(1, rows // groups)
    return min(_BLOCK, max(_SMALLEST, 1 << (mean - 1).bit_length()))


def _by_group(x_MK: jax.Array, w: jax.Array, sizes_E: jax.Array, transposed: bool) -> jax.Array:
    M, wide = x_MK.shape[0], jnp.promote_types(x_MK.dtype, jnp.float32)
    block = block_of(M, w.shape[0])
    padded_MK = jnp.pad(x_MK, ((0, block), (0, 0)))
    axes = (((1,), (1 if transposed else 0,)), ((), ()))

    def visit(y_MN: jax.Array, group: jax.Array, first: jax.Array, counts_B1: jax.Array) -> Any:
        x_BK = jnp.where(counts_B1, lax.dynamic_slice_in_dim(padded_MK, first, block), 0)
        w_group = lax.dynamic_index_in_dim(w, group, keepdims=False)
        y_BN = lax.dot_general(x_BK, w_group, axes, preferred_element_type=wide)
        # What a block writes beyond its group are zeros, which the next one writes over.
        return lax.dynamic_update_slice_in_dim(y_MN, y_BN.astype(x_MK.dtype), first, 0)

    y_MN = jnp.zeros((M + block, w.shape[1 if transposed else 2]), x_MK.dtype)
    return over_blocks(sizes_E, block, y_MN, visit)[:M]


def _outer(x_MK: jax.Array, y_MN: jax.Array, sizes_E: jax.Array) -> jax.Array:
    E, wide = sizes_E.shape[0], jnp.promote_types(x_MK.dtype, jnp.float32)
    block = block_of(x_MK.shape[0], E)
    x_MK, y_MN = (jnp.pad(a, ((0, block), (0, 0))) for a in (x_MK, y_MN))

    def visit(dw_EKN: jax.Array, group: jax.Array, first: jax.Array, counts_B1: jax.Array) -> Any:
        parts = (lax.dynamic_slice_in_dim(a, first, block) for a in (x_MK, y_MN))
        x_BK, y_BN = (jnp.where(counts_B1, part, 0) for part in parts)
        more_KN = lax.dot_general(x_BK, y_BN, (((0,), (0,)), ((), ())), preferred_element_type=wide)
        sum_KN = lax.dynamic_index_in_dim(dw_EKN, group, keepdims=False) + more_KN
        return lax.dynamic_update_index_in_dim(dw_EKN, sum_KN, group, 0)

    dw_EKN = jnp.zeros((E, x_MK.shape[1], y_MN.shape[1]), wide)
    return over_blocks(sizes_E, block, dw_EKN, visit).astype(x_MK.dtype)


blockwise = GroupedProducts(_by_group, _outer)
