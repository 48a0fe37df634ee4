"""Running a kernel that XLA cannot partition: on each device, for the rows and heads it holds.

Legend: B batch, T query tokens, S key tokens, N query heads, K key/value heads, H head width.
"""

from collections.abc import Callable

import jax
from jax.sharding import PartitionSpec

from fornax.mesh import dividing, mesh_in_use

__all__ = ["divide", "over_mesh"]

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
) -> jax.Array:
    """Run `attend` under the mesh in use, batch and heads divided where they divide evenly.

    Args:
        attend: the kernel on one device.
        q_BTNH: queries.
        k_BSKH: keys.
        v_BSKH: values.
        tokens: int32 positions and segment ids, each [B, T] or [B, S].
        sinks_N: one value per query head, or empty.
    """
    mesh = mesh_in_use()
    if mesh is None:
        return attend(q_BTNH, k_BSKH, v_BSKH, tokens, sinks_N)
    rows, heads = divide(q_BTNH, k_BSKH)
    by_head = PartitionSpec(rows, None, heads, None)
    by_row = PartitionSpec(rows, None)
    sinks = PartitionSpec(heads) if sinks_N.size else PartitionSpec()
    return jax.shard_map(
        attend,
        mesh=mesh,
        in_specs=(by_head, by_head, by_head, (by_row,) * len(tokens), sinks),
        out_specs=by_head,
        check_vma=False,
    )(q_BTNH, k_BSKH, v_BSKH, tokens, sinks_N)
