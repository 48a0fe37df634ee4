"""Paged attention and writes under a mesh: each device does the heads it holds.

Legend: T tokens of the step, N query heads, K key/value heads, H head width, L layers, P pages,
S slots of a page, C = 2 K or, where keys are values too, K.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from fornax.kernels._paged_attention.call import PagedInputs
from fornax.kernels._paged_attention.codes import Pages, page_specs
from fornax.mesh import dividing, mesh_in_use

__all__ = ["over_mesh", "write_over_mesh"]


def over_mesh(
    attend: Callable[[PagedInputs], object], inputs: PagedInputs, *, replicated: bool = False
) -> Any:
    """Run `attend` under the mesh in use, heads divided where they divide evenly.

    The cache is divided with the key heads; where these do not divide over the devices, each device
    computes everything. The result has q's layout, or is whole on each device if `replicated`; with
    new tokens the cache in its own layout follows.
    """
    mesh = mesh_in_use()
    if mesh is None:
        return attend(inputs)
    heads = dividing("activation_heads", inputs.q_TNH.shape[1], inputs.kv_heads)
    arrays: dict[str, Any] = {
        "q_TNH": PartitionSpec(None, heads, None),
        "kv_LPSCH": page_specs(inputs.kv_LPSCH, heads),
        "layer": PartitionSpec(),
        "page_table_RW": PartitionSpec(),
        "query_start_R1": PartitionSpec(),
        "context_lens_R": PartitionSpec(),
    }
    if inputs.sinks_N is not None:
        arrays["sinks_N"] = PartitionSpec(heads)
    if inputs.prepared is not None:
        arrays["prepared"] = PartitionSpec()
    if inputs.new is not None:
        by_head = PartitionSpec(None, heads, None)
        arrays["new"] = jax.tree.map(
            lambda array: by_head if array.ndim == 3 else PartitionSpec(), inputs.new
        )

    results = arrays["q_TNH"]
    if inputs.new is not None:
        results = (results, arrays["kv_LPSCH"])

    def local(*parts: object) -> Any:
        named: dict[str, Any] = dict(zip(arrays, parts, strict=True))
        return attend(dataclasses.replace(inputs, **named))

    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=tuple(arrays.values()),
        out_specs=PartitionSpec() if replicated else results,
        check_vma=False,
    )(*(getattr(inputs, name) for name in arrays))


def write_over_mesh(
    write: Callable[..., Pages],
    kv_LPSCH: Pages,
    k_TKH: jax.Array,
    v_TKH: jax.Array | None,
    layer: jax.Array,
    slots_T: jax.Array,
) -> Pages:
    """Run `write` under the mesh in use, the cache divided with the key heads if they divide."""
    mesh = mesh_in_use()
    if mesh is None:
        return write(kv_LPSCH, k_TKH, v_TKH, layer, slots_T)
    heads = dividing("activation_heads", k_TKH.shape[1])
    cache = page_specs(kv_LPSCH, heads)
    tokens = PartitionSpec(None, heads, None)
    return jax.shard_map(
        write,
        mesh=mesh,
        in_specs=(cache, tokens, tokens, PartitionSpec(), PartitionSpec()),
        out_specs=cache,
        check_vma=False,
    )(kv_LPSCH, k_TKH, v_TKH, layer, slots_T)
