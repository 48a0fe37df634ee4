"""Snapshots in memory that outlives the process: where a group that is formed anew goes on.

Under `fornax launch` the agent of a host holds the memory, two files without a name, and each
process writes its parts of the state into the older of them, so that one is always whole
(`fornax.config.snapshot_file` has the layout). Of several hosts each holds a replica of another's:
the newer file is kept until the other host has it, so that there is a step that all can go on from
when a host is lost with its memory.

The interval between snapshots follows from what one costs and how often the run fails.
"""

import contextlib
import hashlib
import json
import mmap
import os
import socket
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from isal.isal_zlib import crc32
from jax.sharding import Mesh

from fornax.checkpoint.arrays import table
from fornax.config.snapshot_file import FIRST, SnapshotFile
from fornax.mesh import hosts
from fornax.train.interval import Interval
from fornax.train.regroup import Held, complete_steps, gathered
from fornax.train.snapshot import Snapshot, free_bytes, local_bytes
from fornax.train.state import TrainState, as_tree

__all__ = ["MemoryTier", "Remembered", "peer_of"]

_ALIGNMENT = 64
_PATIENCE = 4
"""Times that a snapshot is put off for the replica of the one before, a quarter interval each."""


def peer_of(process: int, mesh: Mesh) -> int | None:
    """The process whose host holds the replica of this one's snapshots; None for one alone.

    A ring: the process at the same place in the next slice, so that a slice may be lost; in one
    slice the next process.
    """
    slices = [sorted({d.process_index for d in part.flat}) for part in mesh.devices]
    processes = sorted({number for each in slices for number in each})
    if len(processes) == 1:
        return None
    if len(slices) == 1 or sum(map(len, slices)) > len(processes):  # processes span slices
        return processes[(processes.index(process) + 1) % len(processes)]
    mine = next(n for n, each in enumerate(slices) if process in each)
    there = slices[(mine + 1) % len(slices)]
    return there[slices[mine].index(process) % len(there)]


@dataclass(frozen=True, kw_only=True)
class Remembered:
    """A snapshot of this process's parts, as it lies in memory."""

    step: int
    process: int
    """Whose it is, in its group."""
    processes: int
    config: str
    """Digest of the run's config."""
    arrays: dict[str, list[Any]]
    """Shape and dtype of each array of the state, by path."""
    parts: list[dict[str, list[Any]]]
    """Of each array the parts by their place: offset, shape, dtype, CRC-32."""
    data: list[tuple[int, dict]]
    """The position in the data, of this host's virtual shards."""
    metadata: dict[str, Any]
    """What a checkpoint has there."""


class MemoryTier:
    """The snapshots of this process, and when the next is due."""

    def __init__(
        self,
        paths: Sequence[Path],
        mtbf: float,
        config_yaml: str,
        peer: int | None = None,
        *,
        replicas: Sequence[Path] = (),
        shared: Path | None = None,
    ) -> None:
        """Open the memory.

        Args:
          paths: of two files.
          mtbf: mean seconds between failures of the whole run.
          config_yaml: the run's config; snapshots of another are not looked at.
          peer: the rank whose host is to hold a replica.
          replicas: files of other ranks' snapshots that this host holds, which are read only.
          shared: a directory of all hosts, to exchange snapshots of a group of another size; None:
            those are not looked at.
        """
        self._slots = [_Slot(path) for path in paths]
        self._interval = Interval(mtbf)
        self._peer = peer
        self._put_off = 0
        self._config = hashlib.blake2b(config_yaml.encode(), digest_size=16).hexdigest()
        self._replicas, self._shared = replicas, shared
        self._found: dict[int, tuple[_Slot, Remembered]] = {}
        self._regrouped: dict[int, list[Held]] = {}

    @staticmethod
    def room(abstract: TrainState) -> tuple[bool, bool]:
        """Whether snapshots, and replicas of another host's besides, fit into half of what is free.

        Of each of a host's processes there are two, and of the replicas two as well.
        """
        said = hosts.gather([socket.gethostname(), local_bytes(as_tree(abstract)), free_bytes()])
        needed: Counter[str] = Counter()
        for host, size, _ in said:
            needed[host] += 2 * size
        own, both = (
            all(free is None or times * needed[host] <= free // 2 for host, _, free in said)
            for times in (1, 2)
        )
        return own, both

    def newest(self, abstract: TrainState) -> Mapping[int, Remembered]:
        """The snapshots that every process has whole, of a state like `abstract`, by step; where
        there are none, those of which all parts are held by some process."""
        wanted = _json(table(as_tree(abstract)))
        same = [
            (slot, held)
            for slot in self._slots
            if (held := slot.read()) is not None
            and held.config == self._config
            and held.arrays == wanted
        ]
        own = (jax.process_index(), jax.process_count())
        self._found = {
            held.step: (slot, held) for slot, held in same if (held.process, held.processes) == own
        }
        everywhere = [set(steps) for steps in hosts.gather(sorted(self._found))]
        common = set.intersection(*everywhere)
        if common or self._shared is None:
            return {step: self._found[step][1] for step in sorted(common)}
        for slot in _opened(self._replicas):
            held = slot.read()
            if held is not None and held.config == self._config and held.arrays == wanted:
                same.append((slot, held))
        return self._of_another_group(same)

    def _of_another_group(
        self, held: Sequence[tuple["_Slot", Remembered]]
    ) -> Mapping[int, Remembered]:
        """The steps of which this host and the others hold all parts, each with what it gives."""
        by_name = {(each.step, each.processes, each.process): (slot, each) for slot, each in held}
        self._regrouped = complete_steps([slot.held(each) for slot, each in by_name.values()])
        found: dict[int, Remembered] = {}
        for step, given in self._regrouped.items():
            mine = [by_name[each.step, each.processes, each.process][1] for each in given]
            said = hosts.gather([each.metadata for each in mine])
            found[step] = Remembered(
                step=step,
                process=jax.process_index(),
                processes=jax.process_count(),
                config=self._config,
                arrays={},
                parts=[],
                data=[position for each in mine for position in each.data],
                metadata=next(metadata for each in said for metadata in each),
            )
        return found

    def restore(self, step: int, abstract: TrainState) -> TrainState:
        """The state of one of the `newest`, in arrays of its own.

        Raises:
          CheckpointError: when hosts cannot exchange what they hold of it.
        """
        if step in self._regrouped:
            assert self._shared is not None
            given = self._regrouped[step]
            return TrainState(**gathered(given, as_tree(abstract), self._shared))
        slot, held = self._found[step]
        parts = [{name: slot.part(*at[:3]) for name, at in each.items()} for each in held.parts]
        return TrainState(**Snapshot.of_parts(as_tree(abstract), parts).arrays())

    def begin(self, step: int) -> None:
        """The run goes on after `step`; the first snapshot is of the second step from there, when
        one was made that did not compile."""
        for slot in self._slots:
            if slot.step > step:  # of what is not done again the same way
                slot.erase()
        self._interval.begin(step)

    def is_due(self, step: int) -> bool:
        """Whether the state after `step` is to be kept; called after each step."""
        return self._interval.is_due(step)

    def write(
        self, state: TrainState, step: int, data: Mapping[int, dict], metadata: Mapping[str, Any]
    ) -> None:
        """Keep the state after `step`, in place of the older snapshot. All processes call it.

        Where the replica of the newer one is not whole yet, it is put off: in place of the older
        one, a host that is lost would leave no step that all have.
        """
        if self._waits():
            self._interval.put_off(step, max(1, self._interval.steps // _PATIENCE))
            return
        self.write_now(state, step, data, metadata)

    def write_now(
        self, state: TrainState, step: int, data: Mapping[int, dict], metadata: Mapping[str, Any]
    ) -> None:
        """As `write`, without regard to replicas."""
        self._interval.start(step)  # all steps are done
        tree = as_tree(state)
        slot = min(self._slots, key=lambda each: each.step)
        memory = slot.begin(_room(tree))
        snapshot = Snapshot(tree, memory.allocate)
        places = iter(memory.places)
        parts = [
            {name: [*next(places), crc32(_bytes(part))] for name, part in each.items()}
            for each in snapshot.parts()
        ]
        header = {
            "step": step,
            "process": jax.process_index(),
            "processes": jax.process_count(),
            "config": self._config,
            "arrays": table(tree),
            "parts": parts,
            "data": sorted(data.items()),
            "metadata": dict(metadata),
        }
        slot.finish(json.dumps(header).encode(), step, self._peer)
        self._interval.finish(step)

    def _waits(self) -> bool:
        """Whether a replica is missing, in any process, that may still come."""
        if self._peer is None:
            return False
        newer = max(self._slots, key=lambda each: each.step)
        missing = hosts.most(int(not newer.is_replicated()))
        self._put_off = self._put_off + 1 if missing and self._put_off < _PATIENCE else 0
        return self._put_off > 0


class _Slot:
    """One of the files, mapped."""

    def __init__(self, path: Path) -> None:
        self._file = SnapshotFile(os.open(path, os.O_RDWR | os.O_CLOEXEC))
        self._map: mmap.mmap | None = None
        held = self.read()
        self.step = -1 if held is None else held.step

    def begin(self, size: int) -> "_Memory":
        """Make what is there not whole, and room for `size` bytes of parts."""
        self._file.begin(size)
        if self._map is None or len(self._map) < size:
            self._map = None
            self._map = mmap.mmap(self._file.descriptor, size)
        return _Memory(self._map)

    def finish(self, header: bytes, step: int, peer: int | None) -> None:
        """Write the header after the parts, then that all is whole."""
        assert self._map is not None
        self._file.finish(header, len(self._map), step, peer)
        self.step = step

    def erase(self) -> None:
        """Make what is there not whole."""
        self._file.erase()
        self.step = -1

    def is_replicated(self) -> bool:
        """Whether the other host has what is there; True where there is nothing."""
        found = self._file.found()
        return found is None or self._file.is_replicated(found)

    def read(self) -> Remembered | None:
        """What is there; None where it is not whole, by its marker or its checksums."""
        found = self._file.found()
        header = None if found is None else self._file.header(found)
        if found is None or header is None:
            return None
        held = Remembered(**json.loads(header))
        self._map = mmap.mmap(self._file.descriptor, found.at)
        parts = [part for each in held.parts for part in each.values()]
        whole = all(crc32(_bytes(self.part(*part[:3]))) == part[3] for part in parts)
        return held if whole else None

    def held(self, found: Remembered) -> Held:
        """What `read` found, for other processes."""
        assert self._map is not None
        return Held(
            step=found.step,
            process=found.process,
            processes=found.processes,
            memory=self._map,
            parts=found.parts,
        )

    def part(self, offset: int, shape: Sequence[int], dtype: str) -> np.ndarray:
        """A part of an array where it lies."""
        assert self._map is not None
        return np.ndarray(tuple(shape), np.dtype(dtype), self._map, offset)


def _opened(paths: Sequence[Path]) -> Iterator[_Slot]:
    """Those that are still there."""
    for path in paths:
        with contextlib.suppress(OSError):
            yield _Slot(path)


class _Memory:
    """Hands out a slot's memory, part after part."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory, self._at = memory, FIRST
        self.places: list[tuple[int, tuple[int, ...], str]] = []

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Room for an array."""
        self.places.append((self._at, tuple(shape), str(dtype)))
        part = np.ndarray(tuple(shape), dtype, self._memory, self._at)
        self._at += -(-part.nbytes // _ALIGNMENT) * _ALIGNMENT
        return part


def _room(tree: object) -> int:
    """Bytes that the parts of `tree` take, each filled up to a multiple of the alignment."""
    counts = [len({str(s.index) for s in x.addressable_shards}) for x in jax.tree.leaves(tree)]
    return FIRST + local_bytes(tree) + sum(counts) * _ALIGNMENT


def _json(value: object) -> Any:
    return json.loads(json.dumps(value))


def _bytes(part: np.ndarray) -> np.ndarray:
    """A contiguous array as bytes, whatever its type."""
    return part.reshape(-1).view(np.uint8)
