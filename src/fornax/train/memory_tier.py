"""Snapshots in memory that outlives the process: where a group that is formed again resumes.

Under `fornax launch` the agent of a host holds the memory, two files without a name, and each
process writes its parts of the state into the older of them, so that one is always whole
(`fornax.config.snapshot_file` has the layout). Of several hosts each holds a replica of another's:
the newer file is kept until the other host has it, so that there is a step that all can resume from
when a host is lost with its memory.

The interval between snapshots follows from what one costs and how often the run fails. So does
that between those which are marked, for agents to copy to the disks of their hosts: where nothing
in memory is left, the run resumes from there.
"""

import contextlib
import hashlib
import json
import math
import mmap
import os
import socket
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from isal.isal_zlib import crc32
from jax.sharding import Mesh

from fornax.checkpoint.arrays import table
from fornax.config.host_memory import available_memory
from fornax.config.snapshot_file import FIRST, SnapshotFile
from fornax.mesh import hosts
from fornax.train.interval import Interval, young
from fornax.train.regroup import Held, complete_steps, gathered
from fornax.train.snapshot import Snapshot, local_bytes
from fornax.train.state import TrainState, as_tree

__all__ = ["MemoryTier", "Remembered", "Tier", "peer_of"]

Tier = Literal["memory", "local disk"]

_ALIGNMENT = 64
_PATIENCE = 4
"""Times that a snapshot is put off for the replica of the one before, or for the copy of the one in
whose place it goes, a quarter interval each."""


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
    """A snapshot of this process's parts, as it lies in memory or on the host's disk."""

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
    tier: Tier = "memory"


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
        disk: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
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
          disk: the directory to which this host's agent copies snapshots that are marked; None: of
            all hosts none does.
          clock: seconds, never going back.
        """
        self._slots = [_Slot(path) for path in paths]
        self._interval, self._clock = Interval(mtbf, clock=clock), clock
        self._mtbf, self._disk = mtbf, disk
        self._marked_at, self._copy_seconds = -math.inf, 0.0
        self.passed_over: list[str] = []
        """What is on the disk and cannot be used, and why; in words."""
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
        said = hosts.gather(
            [socket.gethostname(), local_bytes(as_tree(abstract)), available_memory()]
        )
        needed: Counter[str] = Counter()
        for host, size, _ in said:
            needed[host] += 2 * size
        own, both = (
            all(free is None or times * needed[host] <= free // 2 for host, _, free in said)
            for times in (1, 2)
        )
        return own, both

    def newest(
        self,
        abstract: TrainState,
        contradicts: Callable[[Mapping[str, Any]], bool] = lambda metadata: False,
    ) -> Mapping[int, Remembered]:
        """The snapshots that every process has whole in memory, of a state like `abstract`, by
        step; where there are none, those of which all parts are held by some process, or a later
        one that the hosts' disks have.

        Args:
          abstract: of the state.
          contradicts: says of what a checkpoint has as metadata that it is not to be used.
        """
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
        self._regrouped = {}
        if common:
            return {step: self._found[step][1] for step in sorted(common)}
        found: Mapping[int, Remembered] = {}
        if self._shared is not None:
            for slot in _opened(self._replicas):
                held = slot.read()
                if held is not None and held.config == self._config and held.arrays == wanted:
                    same.append((slot, held))
            found = self._of_another_group(same)
        if self._disk is None:
            return found
        there = [
            each
            for each in self._on_disk(self._disk)
            if each[1].arrays == wanted and not contradicts(each[1].metadata)
        ]
        return self._newest_with(there, same, max(found, default=-1)) or found

    def _on_disk(self, directory: Path) -> Iterator[tuple["_Slot", Remembered]]:
        """The snapshots there, by their headers."""
        for path in sorted(directory.glob("[0-9]*")):
            for slot in _opened([path]):
                held = slot.header()
                if held is None:
                    self.passed_over.append(f"{path} is damaged")
                elif held.config != self._config:
                    self.passed_over.append(f"{path} was made with another config")
                else:
                    yield slot, replace(held, tier="local disk")

    def _newest_with(
        self,
        there: Sequence[tuple["_Slot", Remembered]],
        same: Sequence[tuple["_Slot", Remembered]],
        after: int,
    ) -> Mapping[int, Remembered]:
        """The newest step beyond `after` that the hosts have whole, by what is on their disks.

        Only what is given is read: a process's own where all have that, else whatever they have.

        Args:
          there: on this host's disk, by their headers.
          same: in its memory, whole.
          after: a step that they have without.
        """
        own = (jax.process_index(), jax.process_count())
        said = hosts.gather(sorted({held.step for _, held in there}))
        for step in sorted({each for mine in said for each in mine if each > after}, reverse=True):
            at = [each for each in there if each[1].step == step]
            mine = [each for each in at if _group(each[1]) == own and self._is_whole(*each)]
            if not hosts.most(int(not mine)):
                self._found = {step: mine[0]}
                return {step: mine[0][1]}
            if self._shared is None:
                continue
            rest = [each for each in at if _group(each[1]) != own and self._is_whole(*each)]
            in_memory = [each for each in same if each[1].step == step]
            if found := self._of_another_group([*mine, *rest, *in_memory]):
                return {each: replace(held, tier="local disk") for each, held in found.items()}
        return {}

    def _is_whole(self, slot: "_Slot", held: Remembered) -> bool:
        if slot.is_whole(held):
            return True
        self.passed_over.append(f"{slot.path} is damaged")
        return False

    def _of_another_group(
        self, held: Sequence[tuple["_Slot", Remembered]]
    ) -> Mapping[int, Remembered]:
        """The steps of which this host and the others hold all parts, each with what it gives."""
        by_name = {(each.step, each.processes, each.process): (slot, each) for slot, each in held}
        complete = complete_steps([slot.held(each) for slot, each in by_name.values()])
        self._regrouped |= complete
        found: dict[int, Remembered] = {}
        for step, given in complete.items():
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
        """The run resumes after `step`; the first snapshot is of the second step from there, when
        one was made that did not compile."""
        for slot in self._slots:
            if slot.step > step:  # of what is not done again the same way
                slot.erase()
        self._found, self._regrouped = {}, {}  # what is open keeps the room of what is deleted
        if self._disk is not None:
            for slot in _opened(sorted(self._disk.glob("[0-9]*"))):
                if slot.step > step:
                    slot.path.unlink(missing_ok=True)
        self._interval.begin(step)

    def is_due(self, step: int) -> bool:
        """Whether the state after `step` is to be kept; called after each step."""
        return self._interval.is_due(step)

    def write(
        self, state: TrainState, step: int, data: Mapping[int, dict], metadata: Mapping[str, Any]
    ) -> None:
        """Keep the state after `step`, in place of the older snapshot. All processes call it.

        Where the replica of the newer one is not whole yet, it is put off: in place of the older
        one, a host that is lost would leave no step that all have. So it is where the older one is
        being copied to disk.
        """
        if self._waits():
            self._interval.put_off(step, max(1, self._interval.steps // _PATIENCE))
            return
        self.write_now(state, step, data, metadata)

    def write_now(
        self, state: TrainState, step: int, data: Mapping[int, dict], metadata: Mapping[str, Any]
    ) -> None:
        """As `write`, without regard to replicas and copies."""
        self._interval.start(step)  # all steps are done
        to_disk = self._disk is not None and self._is_copy_due()
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
        slot.finish(json.dumps(header).encode(), step, self._peer, to_disk=to_disk)
        self._interval.finish(step)

    def _is_copy_due(self) -> bool:
        """Whether hosts are to copy the next snapshot to their disks: so long after the last one as
        loses the least, and not while one of them copies."""
        now, copies = self._clock(), [slot.copy_seconds() for slot in self._slots]
        self._copy_seconds = max((each for each in copies if each), default=self._copy_seconds)
        age = min(now - self._marked_at, 1e9)
        said = hosts.gather([None in copies, self._copy_seconds, age])
        seconds = max(each for _, each, _ in said)
        if any(busy for busy, *_ in said) or said[0][2] < young(seconds, self._mtbf):
            return False
        self._marked_at = now
        return True

    def _waits(self) -> bool:
        """Whether a replica, or a copy of what would be overwritten, is missing in any process, and
        may still come."""
        if self._peer is None and self._disk is None:
            return False
        older, newer = sorted(self._slots, key=lambda each: each.step)
        alone = self._peer is not None and not newer.is_replicated()
        missing = hosts.most(int(alone or older.copy_seconds() is None))
        self._put_off = self._put_off + 1 if missing and self._put_off < _PATIENCE else 0
        return self._put_off > 0


class _Slot:
    """One of the files, mapped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = SnapshotFile(os.open(path, os.O_RDWR | os.O_CLOEXEC))
        weakref.finalize(self, os.close, self._file.descriptor)
        self._map: mmap.mmap | None = None
        found = self._file.found()
        self.step = -1 if found is None else found.step

    def begin(self, size: int) -> "_Memory":
        """Make what is there not whole, and room for `size` bytes of parts."""
        self._file.begin(size)
        if self._map is None or len(self._map) < size:
            self._map = None
            self._map = mmap.mmap(self._file.descriptor, size)
        return _Memory(self._map)

    def finish(self, header: bytes, step: int, peer: int | None, *, to_disk: bool) -> None:
        """Write the header after the parts, then that all is whole."""
        assert self._map is not None
        self._file.finish(header, len(self._map), step, peer, to_disk=to_disk)
        self.step = step

    def erase(self) -> None:
        """Make what is there not whole."""
        self._file.erase()
        self.step = -1

    def is_replicated(self) -> bool:
        """Whether the other host has what is there; True where there is nothing."""
        found = self._file.found()
        return found is None or self._file.is_replicated(found)

    def copy_seconds(self) -> float | None:
        """What the copy of what is there to the host's disk took, 0.0 where there is none; None
        while it is being made."""
        found = self._file.found()
        return 0.0 if found is None or not found.to_disk else self._file.copied(found)

    def read(self) -> Remembered | None:
        """What is there; None where it is not whole, by its marker or its checksums."""
        held = self.header()
        if held is not None and self.is_whole(held):
            return held
        self.step = -1
        return None

    def header(self) -> Remembered | None:
        """What is there, by its marker and the checksum of its header."""
        found = self._file.found()
        header = None if found is None else self._file.header(found)
        if found is None or header is None:
            return None
        self._map = mmap.mmap(self._file.descriptor, found.at)
        return Remembered(**json.loads(header))

    def is_whole(self, held: Remembered) -> bool:
        """Whether the parts that `header` found have their checksums."""
        parts = [part for each in held.parts for part in each.values()]
        return all(crc32(_bytes(self.part(*part[:3]))) == part[3] for part in parts)

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


def _group(held: Remembered) -> tuple[int, int]:
    """Whose it is, and of how many."""
    return held.process, held.processes


def _json(value: object) -> Any:
    return json.loads(json.dumps(value))


def _bytes(part: np.ndarray) -> np.ndarray:
    """A contiguous array as bytes, whatever its type."""
    return part.reshape(-1).view(np.uint8)
