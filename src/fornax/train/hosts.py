"""From each process's rows to one global batch, and which rows a process must read."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from fornax.config.errors import ShardingError
from fornax.mesh import Rules
from fornax.train.step import batch_shardings
from fornax.train.task import Hosts

__all__ = [
    "abstract_batch",
    "data_shards",
    "find_hosts",
    "padding_text",
    "split_between",
    "to_global",
]


def data_shards(sizes: Mapping[str, int], rules: Rules) -> int:
    """Devices that share a batch's rows, by the sizes of mesh axes."""
    return math.prod(sizes[axis] for axis in rules["batch"])


def padding_text(batch_size: int, shards: int, accumulate: int = 1) -> str | None:
    """What the padding of a batch costs, in a line; None where there is none.

    Args:
      batch_size: rows of a batch.
      shards: devices that share them: `data_shards`.
      accumulate: micro-batches a step; every device gets whole rows of each.
    """
    multiple = shards * accumulate
    padded = Hosts(multiple=multiple).padded(batch_size)
    if padded == batch_size:
        return None
    micro = f" x {accumulate} micro-batches" if accumulate > 1 else ""
    share = (padded - batch_size) / padded
    return (
        f"batch_size={batch_size} does not divide into {shards} data shards{micro}: each batch is "
        f"padded to {padded} rows of which {padded - batch_size} count nothing, {share:.0%} of the "
        f"work; multiples of {multiple} have no padding"
    )


def find_hosts(mesh: Mesh, rules: Rules, accumulate: int = 1) -> Hosts:
    """Which part of a batch's rows this process's devices hold.

    Processes that share a part (tensor parallelism across hosts) read the same rows.

    Raises:
      ShardingError: when the parts of two processes overlap or differ in size: the data could not
        be divided between hosts.
    """
    count = data_shards(mesh.shape, rules)
    rows = jax.ShapeDtypeStruct((count,), np.int32)
    sharding = batch_shardings({"rows": rows}, mesh, rules)["rows"]
    held: dict[int, set[tuple[int, int]]] = {}
    for device, (index,) in sharding.devices_indices_map((count,)).items():
        start, stop, _ = index.indices(count)
        held.setdefault(device.process_index, set()).add((start, stop))
    found = split_between(held, count, jax.process_index())
    return dataclasses.replace(found, multiple=count * accumulate)


def split_between(held: Mapping[int, set[tuple[int, int]]], rows: int, process: int) -> Hosts:
    """The part of `process`, given which spans of `rows` each process's devices hold.

    A part need not be one block: on a torus the devices of a host are neighbours in two
    dimensions, and a mesh axis that winds through the torus meets them again and again.
    """
    parts = {number: tuple(sorted(spans)) for number, spans in held.items()}
    distinct = sorted(set(parts.values()))
    ordered = sorted(span for spans in distinct for span in spans)
    edges = [0, *(stop for _, stop in ordered)]
    sizes = {sum(stop - start for start, stop in spans) for spans in distinct}
    if [start for start, _ in ordered] != edges[:-1] or edges[-1] != rows or len(sizes) > 1:
        raise ShardingError(
            f"the mesh gives processes unequal or overlapping rows of a batch: {distinct}; order "
            "its axes so that each process holds an equal part, or the same as another"
        )
    return Hosts(index=distinct.index(parts[process]), count=len(distinct))


def abstract_batch(
    local: Mapping[str, Any], hosts: Hosts, mesh: Mesh, rules: Rules
) -> dict[str, jax.ShapeDtypeStruct]:
    """What the global batch looks like, with shardings, given one host's rows (or their shapes)."""
    shapes = {
        name: jax.ShapeDtypeStruct((x.shape[0] * hosts.count, *x.shape[1:]), x.dtype)
        for name, x in local.items()
    }
    where = batch_shardings(shapes, mesh, rules)
    return {
        name: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=where[name])
        for name, s in shapes.items()
    }


def to_global(
    local: dict[str, np.ndarray], shapes: dict[str, jax.ShapeDtypeStruct]
) -> dict[str, Any]:
    """The global batch, each process giving its own rows."""
    arrays = {}
    for name, spec in shapes.items():
        sharding = spec.sharding
        assert isinstance(sharding, NamedSharding)
        if sharding.is_fully_addressable:
            arrays[name] = jax.device_put(local[name], sharding)
        else:
            arrays[name] = jax.make_array_from_process_local_data(sharding, local[name], spec.shape)
    return arrays
