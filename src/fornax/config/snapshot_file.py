"""Snapshots of a process's state in files of memory, which outlive it; the layout, without arrays.

A worker writes them, its host's agent holds them and sends them to the agent of another host, which
holds a replica. Agents copy some of them to files of their host's disk, of the same layout,
little-endian:

    0   8s  b"FXSNAP03"
    8   u64 step + 1 once all is written, before that 0
    16  u64 offset of the header; 24 its length; 32 its CRC-32
    40  u64 rank whose host is to hold a replica, + 1; 0 for none
    48  u64 step + 1 once that host has it
    56  u64 1 where hosts that hold it are to copy it to their disks
    64  u64 step + 1 once this host has; 72 microseconds that took, 0 where it has no room
    128 the parts of the arrays, each at a multiple of 64 bytes, then the header: JSON, which has
        the CRC-32 of each part
"""

import math
import os
import struct
from dataclasses import dataclass

from isal.isal_zlib import crc32

__all__ = ["FIRST", "Snapshot", "SnapshotFile"]

FIRST = 128
"""Where the parts begin."""
_MAGIC = b"FXSNAP03"
_HEAD = struct.Struct("<8sQQQQQQQQQ")
_NUMBER = struct.Struct("<Q")
_PAIR = struct.Struct("<QQ")
_DONE_AT, _REPLICATED_AT, _COPIED_AT = 8, 48, 64


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A whole snapshot, as the first bytes of its file describe it."""

    step: int
    at: int
    """Offset of the header, bytes."""
    length: int
    """Of the header, bytes."""
    crc: int
    """Of the header; as that has the checksums of all parts, it tells one snapshot from another."""
    peer: int | None = None
    """The rank whose host is to hold a replica."""
    to_disk: bool = False
    """Whether hosts that hold it are to copy it to their disks."""

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self.at + self.length


class SnapshotFile:
    """One of the files; the descriptor stays its owner's."""

    def __init__(self, descriptor: int) -> None:
        """Read and write through `descriptor`."""
        self.descriptor = descriptor

    def head(self) -> bytes:
        """The first bytes, which change with what is there and with who has it."""
        return os.pread(self.descriptor, _HEAD.size, 0)

    def found(self) -> Snapshot | None:
        """What is there; None where it is not whole, by its marker."""
        head = self.head()
        if len(head) < _HEAD.size:
            return None
        magic, done, at, length, crc, peer, _, to_disk, *_ = _HEAD.unpack(head)
        if magic != _MAGIC or not done:
            return None
        peer = peer - 1 if peer else None
        return Snapshot(
            step=done - 1, at=at, length=length, crc=crc, peer=peer, to_disk=bool(to_disk)
        )

    def header(self, found: Snapshot) -> bytes | None:
        """The JSON of a snapshot; None where it has another checksum."""
        header = os.pread(self.descriptor, found.length, found.at)
        return header if len(header) == found.length and crc32(header) == found.crc else None

    def begin(self, size: int) -> None:
        """Make what is there not whole, and room for at least `size` bytes."""
        self.erase()
        if os.fstat(self.descriptor).st_size < size:
            os.ftruncate(self.descriptor, size)

    def erase(self) -> None:
        """Make what is there not whole."""
        os.pwrite(self.descriptor, bytes(_HEAD.size), 0)

    def finish(
        self,
        header: bytes,
        at: int,
        step: int,
        peer: int | None = None,
        *,
        to_disk: bool = False,
    ) -> None:
        """Write the header at offset `at`, after the parts, then say that all is whole."""
        os.ftruncate(self.descriptor, at)  # a longer header of before
        os.pwrite(self.descriptor, header, at)
        found = Snapshot(
            step=step, at=at, length=len(header), crc=crc32(header), peer=peer, to_disk=to_disk
        )
        self.commit(found)

    def commit(self, snapshot: Snapshot) -> None:
        """Say that the file, parts and header, is the whole `snapshot`."""
        peer = 0 if snapshot.peer is None else snapshot.peer + 1
        place = (snapshot.at, snapshot.length, snapshot.crc)
        said = (peer, 0, int(snapshot.to_disk), 0, 0)
        os.pwrite(self.descriptor, _HEAD.pack(_MAGIC, 0, *place, *said), 0)
        os.pwrite(self.descriptor, _NUMBER.pack(snapshot.step + 1), _DONE_AT)

    def is_replicated(self, found: Snapshot) -> bool:
        """Whether the host that is to have a replica has it."""
        said = os.pread(self.descriptor, _NUMBER.size, _REPLICATED_AT)
        return len(said) == _NUMBER.size and _NUMBER.unpack(said)[0] == found.step + 1

    def set_replicated(self, found: Snapshot) -> None:
        """Say that it does; of no effect on a snapshot of another step that came meanwhile."""
        os.pwrite(self.descriptor, _NUMBER.pack(found.step + 1), _REPLICATED_AT)

    def copied(self, found: Snapshot) -> float | None:
        """Seconds that it took to copy it to this host's disk, 0.0 where that has no room for it;
        None while it is not decided."""
        said = os.pread(self.descriptor, _PAIR.size, _COPIED_AT)
        step, micros = _PAIR.unpack(said) if len(said) == _PAIR.size else (0, 0)
        return micros / 1e6 if step == found.step + 1 else None

    def set_copied(self, found: Snapshot, seconds: float) -> None:
        """Say that this host's disk has it, or with 0.0 that it does not get it; of no effect on a
        snapshot of another step."""
        os.pwrite(self.descriptor, _PAIR.pack(found.step + 1, math.ceil(seconds * 1e6)), _COPIED_AT)
