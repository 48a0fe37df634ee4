"""Running a kernel that XLA cannot partition: on each device, for the rows and heads it holds.

Where the mesh divides the length, devices exchange their parts of it for parts of the heads, and
back (DeepSpeed Ulysses, Jacobs et al. 2023): the kernel sees the whole length.

Legend: B batch, T query tokens, S key tokens, N query heads, K key/value heads, H head width.
"""

import functools
from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import PartitionSpec

from fornax.mesh import axes_in_use, balanced_order, dividing, mesh_in_use, shards

__all__ = ["divide", "on_devices", "over_mesh"]

Attend = Callable[
    [jax.Array, jax.Array, jax.Array, tuple[jax.Array, ...], jax.Array],
    jax.Array,
]


def divide(
    q_BTNH: jax.Array, k_BSKH: jax.Array
) -> tuple[tuple[str, ...] | None, tuple[str, ...] | None]:
    """Mesh axes in use that divide the batch, and the heads; None where they do not evenly."""
    rows = dividing("batch", q_BTNH.shape[0])
    return rows, dividing("activation_heads", q_BTNH.shape[2], k_BSKH.shape[2])


def over_mesh(
    attend: Attend,
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    tokens: tuple[jax.Array, ...],
    sinks_N: jax.Array,
    *,
    balanced: bool = False,
) -> jax.Array:
    """Run `attend` under the mesh in use, batch and heads divided where they divide evenly.

    Heads must divide over the devices that divide the length; see `call.by_heads`.

    Args:
        attend: the kernel on one device.
        q_BTNH: queries.
        k_BSKH: keys.
        v_BSKH: values.
        tokens: int32 positions and segment ids, each [B, T] or [B, S].
        sinks_N: one value per query head, or empty.
        balanced: whether tokens lie in balanced order; `attend` has them in order.
    """
    length = axes_in_use("length")
    if length:
        attend = functools.partial(_by_heads, attend, length, shards(length), balanced)
    return on_devices(attend, q_BTNH, k_BSKH, v_BSKH, tokens, sinks_N)


def on_devices(
    attend: Attend,
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    tokens: tuple[jax.Array, ...],
    sinks_N: jax.Array,
) -> jax.Array:
    """Run `attend` on each device, for its rows, heads and part of the length; as `over_mesh`."""
    mesh = mesh_in_use()
    if mesh is None:
        return attend(q_BTNH, k_BSKH, v_BSKH, tokens, sinks_N)
    rows, heads = divide(q_BTNH, k_BSKH)
    length = axes_in_use("length")
    by_head = PartitionSpec(rows, length or None, heads, None)
    by_row = PartitionSpec(rows, length or None)
    sinks = PartitionSpec(heads) if sinks_N.size else PartitionSpec()
    return jax.shard_map(
        attend,
        mesh=mesh,
        in_specs=(by_head, by_head, by_head, (by_row,) * len(tokens), sinks),
        out_specs=by_head,
        check_vma=False,
    )(q_BTNH, k_BSKH, v_BSKH, tokens, sinks_N)


def _by_heads(
    attend: Attend,
    length: tuple[str, ...],
    devices: int,
    balanced: bool,
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    tokens: tuple[jax.Array, ...],
    sinks_N: jax.Array,
) -> jax.Array:
    """Run `attend` on a device's part of the heads, for all of the length."""

    def reordered(x: jax.Array, order: np.ndarray) -> jax.Array:
        if not balanced:
            return x
        parts = x.reshape(len(x), len(order), -1, *x.shape[2:])
        return parts[:, order].reshape(x.shape)

    there = balanced_order(devices)
    back = np.argsort(there)

    def whole(x_BTNH: jax.Array) -> jax.Array:
        x_BTNH = jax.lax.all_to_all(x_BTNH, length, split_axis=2, concat_axis=1, tiled=True)
        return reordered(x_BTNH, back)

    tokens = tuple(
        reordered(jax.lax.all_gather(ids, length, axis=1, tiled=True), back) for ids in tokens
    )
    if sinks_N.size:
        own = sinks_N.size // devices
        first = jax.lax.axis_index(length) * own
        sinks_N = jax.lax.dynamic_slice_in_dim(sinks_N, first, own)
    o_BTNH = attend(whole(q_BTNH), whole(k_BSKH), whole(v_BSKH), tokens, sinks_N)
    o_BTNH = reordered(o_BTNH, there)
    return jax.lax.all_to_all(o_BTNH, length, split_axis=1, concat_axis=2, tiled=True)
