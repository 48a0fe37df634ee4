"""Experts with room for this many tokens of a row: which assignments are dropped.

The room is that of a row of the batch, so that what is dropped depends neither on the mesh, nor on
micro-batches, nor on the other rows; tokens get it in the order of their positions, so that it
depends on no later token either.

Legend: B rows, T tokens of a row, t those of a device, k experts per token, E experts, A = T k
assignments of a row's tokens to experts.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from fornax.mesh import balanced_order, dividing, mesh_in_use, shards

__all__ = ["drop_tokens"]


def drop_tokens(
    experts_BTk: jax.Array, num_experts: int, capacity: int, *, balanced: bool = False
) -> jax.Array:
    """Leave each expert the first tokens of a row that chose it -> experts int32 [B, T, k].

    Args:
      experts_BTk: int32 experts of each token, all different; `num_experts` for none.
      num_experts: E.
      capacity: how many tokens of a row an expert has room for (`ExpertsConfig.capacity`).
      balanced: whether tokens lie in balanced order over the devices that divide the length.

    Returns:
      The experts, with `num_experts` in place of those that had no room left.
    """
    B, T = experts_BTk.shape[:2]
    mesh = mesh_in_use()
    rows, length = dividing("batch", B), dividing("length", T)
    order_T = np.arange(T)
    if balanced:
        parts = balanced_order(shards(length))
        order_T = (parts[:, None] * (T // len(parts)) + np.arange(T // len(parts))).reshape(-1)
    run = functools.partial(
        _drop, order_T=order_T, num_experts=num_experts, capacity=capacity, length=length or ()
    )
    if mesh is None:
        return run(experts_BTk)
    spec = PartitionSpec(rows, length, None)
    return jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)(
        experts_BTk
    )


def _drop(
    experts_Btk: jax.Array,
    *,
    order_T: np.ndarray,
    num_experts: int,
    capacity: int,
    length: tuple[str, ...],
) -> jax.Array:
    """`drop_tokens` of the tokens that a device holds; `order_T` says where in its row each is."""
    B, t, k = experts_Btk.shape
    whole_BTk = experts_Btk
    if length:
        whole_BTk = jax.lax.all_gather(experts_Btk, length, axis=1, tiled=True)
    experts_BA = whole_BTk.reshape(B, -1)
    A = experts_BA.shape[1]
    place_BA = jnp.broadcast_to(jnp.repeat(jnp.asarray(order_T, jnp.int32), k), (B, A))
    index_BA = jnp.broadcast_to(jnp.arange(A, dtype=jnp.int32), (B, A))
    sorted_BA, _, from_BA = jax.lax.sort((experts_BA, place_BA, index_BA), num_keys=2)
    first_B1 = jnp.ones((B, 1), bool)
    starts_BA = jnp.concatenate([first_B1, sorted_BA[:, 1:] != sorted_BA[:, :-1]], axis=1)
    rank_BA = index_BA - jax.lax.cummax(jnp.where(starts_BA, index_BA, 0), axis=1)
    left_BA = jnp.where(rank_BA < capacity, sorted_BA, num_experts)
    _, left_BA = jax.lax.sort((from_BA, left_BA), num_keys=1)
    left_BTk = left_BA.reshape(whole_BTk.shape)
    if not length:
        return left_BTk
    return jax.lax.dynamic_slice_in_dim(left_BTk, jax.lax.axis_index(length) * t, t, axis=1)
