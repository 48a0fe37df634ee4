"""Compiled programs in memory that outlives the process: a file without a name that an agent holds.

The file is a row of entries, little-endian, each

    0   4s  b"FXP1"
    4   u8  trial: 0 never run here, 1 begun, 2 it ran
    8   u64 bytes of the image
    16  32s key of the program
    48  32s SHA-256 of the image
    80      the image

An image is native code. It counts as tried once a step that ran it has ended: an entry whose
trial was begun and did not end took its process with it, or fell with its group, and is not used
again. The processes of a host that share a file take turns by a lock.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["LIMIT_BYTES", "PLAN_KEY", "ProgramMemory"]

LIMIT_BYTES = 1 << 30
"""Of a host's programs; beyond it the oldest are dropped."""
PLAN_KEY = hashlib.sha256(b"plan").hexdigest()
"""Key of the entry that says how this run's step is made, for other numbers of hosts."""

_MAGIC = b"FXP1"
_HEAD = struct.Struct("<4sB3xQ32s32s")
_TRIAL_AT = 4
_UNTRIED, _BEGUN, _RAN = range(3)


@dataclass(frozen=True)
class _Entry:
    at: int
    trial: int
    size: int
    key: str
    digest: bytes

    @property
    def end(self) -> int:
        return self.at + _HEAD.size + self.size


class ProgramMemory:
    """The programs of a host's processes."""

    def __init__(self, path: Path) -> None:
        """Open the file, which is there."""
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def close(self) -> None:
        """Close the file; what is in it stays."""
        os.close(self._file)

    def find(self, key: str) -> tuple[bytes | None, bool]:
        """The image of a program, None where there is none that can be trusted; and whether there
        was one that cannot: it is damaged, or did not survive its trial."""
        with self._locked():
            entry = self._entries().get(key)
            if entry is None:
                return None, False
            image = os.pread(self._file, entry.size, entry.at + _HEAD.size)
        whole = hashlib.sha256(image).digest() == entry.digest
        return (image, False) if whole and entry.trial != _BEGUN else (None, True)

    def keep(self, key: str, image: bytes) -> None:
        """Keep a program that was not run here yet, in place of an earlier one of the same key."""
        with self._locked():
            entries = list(self._entries().values())
            kept = [entry for entry in entries if entry.key != key]
            while kept and sum(entry.size for entry in kept) + len(image) > LIMIT_BYTES:
                kept.pop(0)
            end = entries[-1].end if entries else 0
            if len(kept) < len(entries):
                whole = b"".join(os.pread(self._file, e.end - e.at, e.at) for e in kept)
                os.pwrite(self._file, whole, 0)
                end = len(whole)
            os.ftruncate(self._file, end)
            head = _HEAD.pack(
                _MAGIC, _UNTRIED, len(image), bytes.fromhex(key), hashlib.sha256(image).digest()
            )
            os.pwrite(self._file, image, end + _HEAD.size)
            os.pwrite(self._file, head, end)

    def begin_trial(self, key: str) -> None:
        """The program is about to run here for the first time."""
        self._mark(key, _BEGUN, {_UNTRIED})

    def end_trial(self, key: str) -> None:
        """The program ran."""
        self._mark(key, _RAN, {_BEGUN})

    def keep_plan(self, plan: Mapping[str, object]) -> None:
        """Say how this run's step is made."""
        self.keep(PLAN_KEY, json.dumps(plan).encode())

    def plan(self) -> dict[str, Any] | None:
        """How the run's step is made, if it said so."""
        found, _ = self.find(PLAN_KEY)
        return None if found is None else json.loads(found)

    def _mark(self, key: str, trial: int, before: set[int]) -> None:
        with self._locked():
            entry = self._entries().get(key)
            if entry is not None and entry.trial in before:
                os.pwrite(self._file, bytes([trial]), entry.at + _TRIAL_AT)

    def _entries(self) -> dict[str, _Entry]:
        """What is there, oldest first, up to one that was not written to its end."""
        found: dict[str, _Entry] = {}
        at, size = 0, os.fstat(self._file).st_size
        while at + _HEAD.size <= size:
            head = os.pread(self._file, _HEAD.size, at)
            magic, trial, length, key, digest = _HEAD.unpack(head)
            entry = _Entry(at, trial, length, key.hex(), digest)
            if magic != _MAGIC or entry.end > size:
                break
            found[entry.key] = entry
            at = entry.end
        return found

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)
