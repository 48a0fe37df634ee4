"""Paged attention and writes under a mesh: each device does the heads it holds.

Legend: T tokens of the step, N query heads, K key/value heads, H head width, L layers, P pages,
S slots of a page, C = 2 K.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from fornax.kernels._paged_attention.call import PagedInputs
from fornax.mesh import current_mesh, current_rules

__all__ = ["over_mesh", "write_over_mesh"]


def _axes(mesh: Mesh) -> tuple[tuple[str, ...], int]:
    """Return the mesh axes that divide heads, and over how many devices."""
    axes = tuple(a for a in current_rules()["activation_heads"] if mesh.shape[a] > 1)
    return axes, math.prod(mesh.shape[a] for a in axes)


def over_mesh(
    attend: Callable[[PagedInputs], Any], inputs: PagedInputs, *, replicated: bool = False
) -> Any:
    """Run `attend` under the mesh in use, heads divided where they divide evenly.

    The cache is divided with the key heads; where these do not divide over the devices, each device
    computes everything. The result has q's layout, or is whole on each device if `replicated`.
    """
    mesh = current_mesh()
    if mesh is None or mesh.size == 1:
        return attend(inputs)
    axes, shards = _axes(mesh)
    heads = None if inputs.q_TNH.shape[1] % shards or inputs.kv_heads % shards else axes or None
    arrays = {
        "q_TNH": PartitionSpec(None, heads, None),
        "kv_LPSCH": PartitionSpec(None, None, None, heads, None),
        "layer": PartitionSpec(),
        "page_table_RW": PartitionSpec(),
        "query_start_R1": PartitionSpec(),
        "context_lens_R": PartitionSpec(),
    }
    if inputs.sinks_N is not None:
        arrays["sinks_N"] = PartitionSpec(heads)
    if inputs.prepared is not None:
        arrays["prepared"] = PartitionSpec()

    def local(*parts: Any) -> Any:
        named: dict[str, Any] = dict(zip(arrays, parts, strict=True))
        return attend(dataclasses.replace(inputs, **named))

    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=tuple(arrays.values()),
        out_specs=PartitionSpec() if replicated else arrays["q_TNH"],
        check_vma=False,
    )(*(getattr(inputs, name) for name in arrays))


def write_over_mesh(
    write: Callable[..., jax.Array],
    kv_LPSCH: jax.Array,
    k_TKH: jax.Array,
    v_TKH: jax.Array,
    layer: jax.Array,
    slots_T: jax.Array,
) -> jax.Array:
    """Run `write` under the mesh in use, the cache divided with the key heads if they divide."""
    mesh = current_mesh()
    if mesh is None or mesh.size == 1:
        return write(kv_LPSCH, k_TKH, v_TKH, layer, slots_T)
    axes, shards = _axes(mesh)
    heads = axes if axes and k_TKH.shape[1] % shards == 0 else None
    cache = PartitionSpec(None, None, None, heads, None)
    tokens = PartitionSpec(None, heads, None)
    return jax.shard_map(
        write,
        mesh=mesh,
        in_specs=(cache, tokens, tokens, PartitionSpec(), PartitionSpec()),
        out_specs=cache,
        check_vma=False,
    )(kv_LPSCH, k_TKH, v_TKH, layer, slots_T)
