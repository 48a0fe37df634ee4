"""A copy of a tree of arrays in the hosts' memory, from which the same tree can be made again."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from fornax.config.errors import ConfigError
from fornax.config.host_memory import available_memory
from fornax.mesh import hosts

__all__ = ["Snapshot", "check_room", "local_bytes"]


Allocate = Callable[[tuple[int, ...], np.dtype], np.ndarray]


@dataclass(frozen=True)
class _Copied:
    """One array: this process's parts of it, each once however many devices hold it."""

    shape: tuple[int, ...]
    sharding: Sharding
    parts: Mapping[str, np.ndarray]
    places: list[tuple[jax.Device, str]]


class Snapshot:
    """The parts of a tree's arrays that this process holds.

    The copy waits for the computation of the arrays. They may be donated once it is made.
    """

    def __init__(self, tree: object, allocate: Allocate = np.empty) -> None:
        """Copy the arrays of `tree`, of any shardings, several processes' too.

        Args:
          tree: arrays.
          allocate: (shape, dtype) to an array for one part, called in the order of `parts`.
        """
        leaves, self._structure = jax.tree.flatten(tree)
        for leaf in leaves:
            for shard in leaf.addressable_shards:
                shard.data.copy_to_host_async()
        self._arrays = [_copied(leaf, allocate) for leaf in leaves]

    @classmethod
    def of_parts(cls, abstract: object, parts: Iterable[Mapping[str, np.ndarray]]) -> "Snapshot":
        """The snapshot of a tree like `abstract` (ShapeDtypeStructs with shardings) that had these
        `parts`; they are not copied."""
        snapshot = cls.__new__(cls)
        leaves, snapshot._structure = jax.tree.flatten(abstract)
        snapshot._arrays = [
            _Copied(leaf.shape, leaf.sharding, held, _places(leaf))
            for leaf, held in zip(leaves, parts, strict=True)
        ]
        return snapshot

    def parts(self) -> list[Mapping[str, np.ndarray]]:
        """Of each array, in the tree's order, the parts by their place."""
        return [each.parts for each in self._arrays]

    def arrays(self) -> Any:
        """The tree again, in arrays of its own that may be donated."""
        return jax.tree.unflatten(self._structure, [_placed(each) for each in self._arrays])


def _copied(array: jax.Array, allocate: Allocate) -> _Copied:
    parts: dict[str, np.ndarray] = {}
    places = []
    for shard in array.addressable_shards:
        name = str(shard.index)
        places.append((shard.device, name))
        if name not in parts:
            parts[name] = allocate(shard.data.shape, shard.data.dtype)
            np.copyto(parts[name], np.asarray(shard.data))
    return _Copied(array.shape, array.sharding, parts, places)


def _places(leaf: jax.ShapeDtypeStruct) -> list[tuple[jax.Device, str]]:
    assert leaf.sharding is not None
    indices = leaf.sharding.addressable_devices_indices_map(leaf.shape)
    return [(device, str(index)) for device, index in indices.items()]


def _placed(copied: _Copied) -> jax.Array:
    kind = copied.sharding.memory_kind
    # A device of a CPU takes memory over that suits it, whatever `may_alias` says: give it a copy.
    pieces = [
        jax.device_put(np.array(copied.parts[name]), SingleDeviceSharding(device, memory_kind=kind))
        for device, name in copied.places
    ]
    return jax.make_array_from_single_device_arrays(copied.shape, copied.sharding, pieces)


def local_bytes(abstract: object) -> int:
    """Bytes of one snapshot in this process, of a tree of ShapeDtypeStructs with shardings."""
    total = 0
    for leaf in jax.tree.leaves(abstract):
        indices = leaf.sharding.addressable_devices_indices_map(leaf.shape).values()
        distinct = len({str(index) for index in indices})
        part = np.prod(leaf.sharding.shard_shape(leaf.shape), dtype=np.int64)
        total += distinct * int(part) * leaf.dtype.itemsize
    return total


def check_room(abstract: object, count: int) -> None:
    """Refuse snapshots that do not fit into the memory of a host.

    Raises:
      ConfigError: in every process, naming the one with too little.
    """
    needed, free = count * local_bytes(abstract), available_memory()
    for number, (wants, has) in enumerate(hosts.gather([needed, free])):
        if has is not None and wants > has:
            raise ConfigError(
                f"spikes: {count} copies of the state take {wants / 2**30:.1f} GiB of the memory "
                f"of process {number}'s host, which has {has / 2**30:.1f} GiB free. Set "
                "spikes.snapshots to fewer, or spikes.snapshot_every to null to go back to "
                "checkpoints only"
            )
