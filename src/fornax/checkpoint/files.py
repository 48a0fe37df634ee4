"""A checkpoint directory on disk: its steps, what a kill left behind, checksums of files."""

import errno
import os
import re
import shutil
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

from isal.isal_zlib import crc32, crc32_combine

from fornax.checkpoint.records import is_complete, record_path
from fornax.config.errors import CheckpointError, DiskFullError
from fornax.config.files import is_full, sync

__all__ = [
    "checksums",
    "claim",
    "complete_steps",
    "delete_step",
    "find_damage",
    "read_epoch",
    "remove_leftovers",
    "step_path",
    "write_epoch",
]

_STEP = re.compile(r"(\d+)(\.orbax-checkpoint-tmp.*)?")
_CLAIM = "fornax-checkpoints"
_EPOCH = "fornax-epoch"
_PART = 1 << 25
"""Bytes of a file that one thread hashes."""
_BLOCK = 1 << 20
"""Bytes read at a time: they stay in the cache until they are hashed."""


def step_path(root: Path, step: int) -> Path:
    """The directory of a step."""
    return root / str(step)


def complete_steps(root: Path) -> list[int]:
    """Steps that are whole on disk, ascending. A directory that is not there has none."""
    if not root.is_dir():
        return []
    names = (entry.name for entry in root.iterdir() if entry.is_dir())
    return sorted(int(name) for name in names if name.isdecimal() and is_complete(root / name))


def claim(root: Path) -> None:
    """Make `root` a checkpoint directory of ours, or refuse it.

    Raises:
      CheckpointError: when it cannot be written, or holds numbered directories of someone else.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        mark = root / _CLAIM
        if not mark.exists():
            foreign = sorted(name for name in os.listdir(root) if _STEP.fullmatch(name))
            if foreign:
                raise CheckpointError(
                    f"{root} holds {', '.join(foreign[:5])}, which Fornax did not write, and a "
                    "run would clean them up; choose an empty directory"
                )
            mark.write_text("Checkpoints of a Fornax run, one directory per step.\n")
        probe = root / f".writable.{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise (DiskFullError if is_full(error) else CheckpointError)(
            f"cannot write checkpoints to {root} ({error.strerror or error}); choose a directory "
            "that can be written"
        ) from error


def read_epoch(root: Path) -> int:
    """The group of processes that may write here; 0 where none of `fornax launch` ever did."""
    try:
        return int((root / _EPOCH).read_text())
    except FileNotFoundError:
        return 0


def write_epoch(root: Path, epoch: int) -> None:
    """Let only the processes of this group write here, durably, from now on.

    The file is overwritten in place, which takes no room on a disk that is full.

    Raises:
      CheckpointError: when it cannot be written.
    """
    if not (root / _EPOCH).exists():
        claim(root)
    try:
        file = os.open(root / _EPOCH, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            os.pwrite(file, f"{epoch:019d}\n".encode(), 0)
            os.fsync(file)
        finally:
            os.close(file)
        sync(root)
    except OSError as error:
        raise CheckpointError(
            f"cannot write {root / _EPOCH} ({error.strerror}), which keeps processes of earlier "
            "groups out; choose a directory that can be written"
        ) from error


def remove_leftovers(root: Path) -> list[str]:
    """Delete what interrupted saves and deletions left; names of what was deleted."""
    removed = []
    for entry in sorted(root.iterdir()):
        match = _STEP.fullmatch(entry.name)
        if match and entry.is_dir() and (match[2] or not is_complete(entry)):
            shutil.rmtree(entry)
            removed.append(entry.name)
    return removed


def delete_step(root: Path, step: int) -> None:
    """Delete a step; interrupted at any point, it leaves the step whole or not complete."""
    directory = step_path(root, step)
    record_path(directory, 0).unlink(missing_ok=True)
    shutil.rmtree(directory)


def checksums(directory: Path, process: int, processes: int) -> dict[str, tuple[int, int]]:
    """Size and CRC-32 of one process's share of the files below `directory`."""
    share = [n for n in _files(directory) if crc32(n.encode()) % processes == process]
    files = [(directory / name, (directory / name).stat().st_size) for name in share]
    sums = zip(share, files, _hashed(files), strict=True)
    return {name: (size, crc) for name, (_, size), crc in sums}


def _files(directory: Path) -> Iterator[str]:
    records = re.compile(r"fornax\.\d+\.json|\.fornax\.\d+\.json\.\w+")  # and drafts of them
    for parent, _, names in os.walk(directory):
        for name in names:
            relative = str((Path(parent) / name).relative_to(directory))
            if not records.fullmatch(relative):
                yield relative


def find_damage(
    directory: Path, expected: Mapping[str, tuple[int, int]], *, contents: bool
) -> str | None:
    """The first file that is not as it was saved, in words; None when all are.

    Args:
      directory: a step's directory.
      expected: size and CRC-32 by path.
      contents: read the files and compare checksums; else compare sizes only.
    """
    path = directory
    try:
        for name, (size, _) in expected.items():
            path = directory / name
            if (found := path.stat().st_size) != size:
                return f"{path} has {found} bytes instead of {size}"
        if not contents:
            return None
        files = [(directory / name, size) for name, (size, _) in expected.items()]
        with closing(_hashed(files)) as sums:
            for name, (_, crc) in expected.items():
                path = directory / name
                if next(sums) != crc:
                    return f"{path} has other contents than were saved (CRC-32 differs)"
    except FileNotFoundError:
        return f"{path} is missing"
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})"
    return None


def _hashed(files: Sequence[tuple[Path, int]]) -> Generator[int, None, None]:
    """CRC-32 of each of the files, given with their sizes; all cores hash, each a part of a file.

    Raises:
      OSError: for the file whose turn it is, when it cannot be read or is shorter.
    """
    pool = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="checksum")
    try:
        pending = [
            [
                (pool.submit(_hash_part, path, start, min(_PART, size - start)), size - start)
                for start in range(0, size, _PART)
            ]
            for path, size in files
        ]
        for parts in pending:
            crc = 0
            for part, rest in parts:
                crc = crc32_combine(crc, part.result(), min(_PART, rest))
            yield crc
    finally:
        pool.shutdown(cancel_futures=True)


def _hash_part(path: Path, start: int, length: int) -> int:
    crc, block = 0, memoryview(bytearray(min(length, _BLOCK)))
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while length:
            count = file.readinto(block[:length])
            if not count:
                raise OSError(errno.EIO, "it ends too early", str(path))
            crc = crc32(block[:count], crc)
            length -= count
    return crc
