"""Versions of the weights in memory that the processes of a machine share.

A trainer writes a version once; samplers of its machine map it, others get its arrays over TCP.
Memory is used again: what the system has to hand out again is written at a tenth of the speed.
"""

import fcntl
import math
import mmap
import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from isal.isal_zlib import crc32

from fornax.config.errors import EngineError

__all__ = ["HostWeights", "Segment", "SegmentPool", "as_array", "map_segment"]

HostWeights = Mapping[tuple[str | int, ...], np.ndarray]
"""Path to array of all parameters of a version."""

_ALIGNMENT = 64
_CHUNK = 1 << 18
_THREADS = 4
_MOST_MAPPED = 8
_SHARED = sys.platform == "linux"
_SEALS = getattr(fcntl, "F_SEAL_SHRINK", 0) | getattr(fcntl, "F_SEAL_GROW", 0)


@dataclass(eq=False)
class Segment:
    """The arrays of a version, one after the other."""

    memory: mmap.mmap
    descriptor: int | None
    """Of the memory, for other processes; None where the system has none to pass on."""
    layout: Sequence[Mapping[str, Any]] = ()
    """Path, dtype, shape, offset and CRC-32 of each array."""
    users: int = 0
    """Who reads it; nobody may write while there are any."""
    lost: bool = False
    """Whether somebody had it of whom nothing is known: it is not written to again."""

    def write(self, weights: HostWeights, layout: Sequence[Mapping[str, Any]]) -> None:
        """Copy the arrays, and sum them while the cache has them."""
        whole = np.frombuffer(self.memory, np.uint8)

        def copy(facts: Mapping[str, Any], array: np.ndarray) -> Mapping[str, Any]:
            source = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            target, found = whole[facts["offset"] :][: len(source)], 0
            for start in range(0, len(source), _CHUNK):
                part = target[start : start + _CHUNK]
                np.copyto(part, source[start : start + _CHUNK])
                found = crc32(part, found)
            return {**facts, "crc32": found}

        with ThreadPoolExecutor(_THREADS) as pool:
            self.layout = list(pool.map(copy, layout, weights.values()))

    def arrays(self) -> HostWeights:
        """What was written, without a copy."""
        return _arrays(self.memory, self.layout)

    def close(self) -> None:
        """Give the descriptor back; the memory goes with the last array that lies in it."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


class SegmentPool:
    """Segments that are written again once nobody reads them; one thread at a time uses it."""

    def __init__(self) -> None:
        self._free: list[Segment] = []
        self._closed = False

    def take(self, weights: HostWeights) -> tuple[Segment, list[dict[str, Any]]]:
        """A segment with room for arrays, for its one user, and their places in it."""
        layout, offset = [], 0
        for path, array in weights.items():
            facts = {"path": list(path), "dtype": array.dtype.name, "shape": list(array.shape)}
            layout.append({**facts, "offset": offset})
            offset += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        size = max(offset, 1)
        found = next((each for each in self._free if len(each.memory) == size), None)
        if found is None:
            self._drop()  # of other sizes
            found = _new(size)
        else:
            self._free.remove(found)
        found.users = 1
        return found, layout

    def leave(self, segment: Segment, *, lost: bool = False) -> None:
        """One user less; `lost` where it may read on although nothing is received from it."""
        segment.users -= 1
        segment.lost = segment.lost or lost
        if segment.users == 0:
            if segment.lost or self._closed:
                segment.close()
            else:
                self._free.append(segment)

    def close(self) -> None:
        """Give memory back, what is in use when it is left."""
        self._closed = True
        self._drop()

    def _drop(self) -> None:
        while self._free:
            self._free.pop().close()


def _new(size: int) -> Segment:
    if not _SHARED:
        return Segment(memory=mmap.mmap(-1, size), descriptor=None)
    descriptor = os.memfd_create("fornax-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)  # who maps it need not fear its end
    return Segment(memory=mmap.mmap(descriptor, size), descriptor=descriptor)


def map_segment(
    descriptor: int,
    size: int,
    layout: Sequence[Mapping[str, Any]],
    known: dict[int, mmap.mmap],
) -> dict[tuple[str | int, ...], np.ndarray]:
    """The arrays of another process's segment, to be read only; takes the descriptor.

    Args:
      descriptor: of the memory.
      size: of it, in bytes.
      layout: see `Segment`.
      known: memory that was mapped before, by inode; what is mapped now is added.

    Raises:
      EngineError: for memory of another size, or that can become smaller, and for bytes with
        another checksum.
    """
    try:
        if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise EngineError("weights came in memory that is not sealed")
        facts = os.fstat(descriptor)
        if facts.st_size != size:
            raise EngineError(f"weights came in memory of other than {size} bytes")
        if (memory := known.pop(facts.st_ino, None)) is None:
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            memory = mmap.mmap(descriptor, size, flags=flags, prot=mmap.PROT_READ)
    except OSError as error:
        raise EngineError(f"memory with weights cannot be mapped: {error}") from error
    finally:
        os.close(descriptor)
    known[facts.st_ino] = memory
    while len(known) > _MOST_MAPPED:
        del known[next(iter(known))]
    found = _arrays(memory, layout)
    with ThreadPoolExecutor(_THREADS) as pool:
        sums = list(pool.map(lambda array: crc32(array.reshape(-1).view(np.uint8)), found.values()))
    if sums != [each["crc32"] for each in layout]:
        raise EngineError("weights in shared memory have a wrong checksum")
    return found


def _arrays(
    memory: mmap.mmap, layout: Sequence[Mapping[str, Any]]
) -> dict[tuple[str | int, ...], np.ndarray]:
    return {tuple(facts["path"]): as_array(memory, facts) for facts in layout}


def as_array(memory: Any, facts: Mapping[str, Any]) -> np.ndarray:
    """An array in memory, by its `path`, `dtype`, `shape` and, unless it is 0, `offset`.

    Raises:
      EngineError: when bytes and shape do not fit, or the type is none of a parameter.
    """
    try:
        dtype = np.dtype(getattr(ml_dtypes, facts["dtype"], facts["dtype"]))
        shape = tuple(map(int, facts["shape"]))
        array = np.frombuffer(memory, dtype, math.prod(shape), int(facts.get("offset", 0)))
        return array.reshape(shape)
    except (TypeError, ValueError, AttributeError) as error:
        raise EngineError(
            f"the array {facts['path']} came as {facts['dtype']} {facts['shape']} in {len(memory)} "
            f"bytes, which do not fit ({error}); give trainer and samplers the same Fornax"
        ) from error
