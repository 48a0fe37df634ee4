"""From each process's rows to one global batch, and which rows a process must read."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from fornax.config.errors import ShardingError
from fornax.mesh import Rules
from fornax.train.step import batch_shardings
from fornax.train.task import Hosts

__all__ = ["abstract_batch", "check_rows", "find_hosts", "split_between", "to_global"]


def check_rows(batch_size: int, accumulate: int, mesh: Mesh, rules: Rules) -> None:
    """Refuse a batch whose micro-batches do not divide over the devices that share rows.

    Raises:
      ShardingError: with a batch size that would.
    """
    shards = 1
    for axis in rules["batch"]:
        shards *= mesh.shape[axis]
    if batch_size % (shards * accumulate):
        needs = shards * accumulate
        micro = f" x {accumulate} micro-batches" if accumulate > 1 else ""
        raise ShardingError(
            f"batch_size={batch_size} does not divide into {shards} data shards{micro}; use a "
            f"multiple of {needs}, such as {-(-batch_size // needs) * needs}, or another mesh"
        )


def find_hosts(batch_size: int, mesh: Mesh, rules: Rules) -> Hosts:
    """Which part of a batch's rows this process's devices hold.

    Processes that share a part (tensor parallelism across hosts) read the same rows.

    Raises:
      ShardingError: when the parts of two processes overlap or differ in size: the data could not
        be divided between hosts.
    """
    rows = jax.ShapeDtypeStruct((batch_size,), np.int32)
    sharding = batch_shardings({"rows": rows}, mesh, rules)["rows"]
    held: dict[int, set[tuple[int, int]]] = {}
    for device, (index,) in sharding.devices_indices_map((batch_size,)).items():
        start, stop, _ = index.indices(batch_size)
        held.setdefault(device.process_index, set()).add((start, stop))
    return split_between(held, batch_size, jax.process_index())


def split_between(held: Mapping[int, set[tuple[int, int]]], batch_size: int, process: int) -> Hosts:
    """The part of `process`, given which spans of rows each process's devices hold.

    A part need not be one block: on a torus the devices of a host are neighbours in two
    dimensions, and a mesh axis that winds through the torus meets them again and again.
    """
    parts = {number: tuple(sorted(spans)) for number, spans in held.items()}
    distinct = sorted(set(parts.values()))
    ordered = sorted(span for spans in distinct for span in spans)
    edges = [0, *(stop for _, stop in ordered)]
    sizes = {sum(stop - start for start, stop in spans) for spans in distinct}
    if [start for start, _ in ordered] != edges[:-1] or edges[-1] != batch_size or len(sizes) > 1:
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
