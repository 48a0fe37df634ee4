"""Whole files of remote sources on the local disk: bounded, the least recently used leave first.

    ROOT/KEY/NAME     a file; the folder's time is that of its last use
    ROOT/.leases/ID   what a live process uses, a key and its bytes per line, locked by the process

A file that a live process uses stays. Locks are the kernel's (`flock`) and end with their process,
so nothing is left to clear after a kill.
"""

import fcntl
import os
import shutil
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from fornax.config.errors import DataError

__all__ = ["FileCache"]

_PARTIAL = ".partial"


@dataclass
class _Lease:
    """What this process uses of a cache."""

    descriptor: int
    keys: set[str] = field(default_factory=set)


# One lease per process (a fork is another) and cache, for as long as the process lives.
_leases: dict[tuple[int, Path], _Lease] = {}
_threads = threading.Lock()


class FileCache:
    """Files by key below `root`, together at most `limit` bytes (None: without a limit)."""

    def __init__(self, root: Path, limit: int | None):
        self.root = root
        self._limit = limit

    def get(self, key: str, name: str, size: int, fetch: Callable[[Path], None]) -> Path:
        """The file `name` under `key`, which this process may use until it ends.

        Args:
          key: stands for its contents; a folder's name.
          name: what the file is called.
          size: bytes that it will have, for which room is made.
          fetch: writes it to a path; called only when it is not there.

        Raises:
          DataError: when there is no room: what live processes use fills the cache.
        """
        target = self.root / key / name
        with self._locked():
            self._use(key, size)
            if target.is_file():
                return target
            self._make_room(name)
        partial = target.with_name(f"{uuid.uuid4().hex}{_PARTIAL}")
        try:
            fetch(partial)
            os.replace(partial, target)
        finally:
            partial.unlink(missing_ok=True)
        return target

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep other threads and processes from looking or deleting meanwhile."""
        self.root.mkdir(parents=True, exist_ok=True)
        with _threads, (self.root / ".lock").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _use(self, key: str, size: int) -> None:
        lease = _leases.get((os.getpid(), self.root))
        if lease is None:
            path = self.root / ".leases" / uuid.uuid4().hex
            path.parent.mkdir(exist_ok=True)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            lease = _leases[os.getpid(), self.root] = _Lease(descriptor)
        if key not in lease.keys:
            os.write(lease.descriptor, f"{key} {size}\n".encode())
            lease.keys.add(key)
        (self.root / key).mkdir(exist_ok=True)
        os.utime(self.root / key)

    def _make_room(self, name: str) -> None:
        """Delete what is not in use, oldest use first, until all that is in use fits."""
        if self._limit is None:
            return
        used = self._in_use()
        entries = sorted(self._entries(), key=lambda entry: entry[1])
        # What is being fetched counts as what it will be.
        sizes = {path: max(size, used.get(path.name, 0)) for path, _, size in entries}
        total = sum(sizes.values())
        for path, size in sizes.items():
            if total > self._limit and path.name not in used:
                shutil.rmtree(path)
                total -= size
        if total > self._limit:
            raise DataError(
                f"{name} does not fit: the remote files in use take {_gib(total)} with it, and "
                f"{self.root} may hold {_gib(self._limit)}; raise cache_gib, or read the data from "
                "a mounted file system"
            )

    def _entries(self) -> Iterator[tuple[Path, int, int]]:
        """Each key's folder, its last use in nanoseconds, its bytes."""
        for folder in self.root.iterdir():
            if folder.name.startswith(".") or not folder.is_dir():
                continue
            with suppress(FileNotFoundError):
                sizes = [file.stat().st_size for file in folder.iterdir()]
                yield folder, folder.stat().st_mtime_ns, sum(sizes)

    def _in_use(self) -> dict[str, int]:
        """The bytes of each key that a live process uses; leases of dead ones are removed."""
        used: dict[str, int] = {}
        for path in (self.root / ".leases").iterdir():
            if _abandoned(path):
                path.unlink()
                continue
            for line in path.read_text().splitlines():
                key, size = line.split()
                used[key] = int(size)
        return used


def _gib(size: int) -> str:
    return f"{size / 2**30:.3g} GiB"


def _abandoned(lease: Path) -> bool:
    """Whether the process that holds a lease has ended."""
    with lease.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
    return True
