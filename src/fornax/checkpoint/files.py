"""A checkpoint directory on disk: its steps, what a kill left behind, checksums of files."""

import os
import re
import shutil
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from fornax.checkpoint.records import is_complete, record_path
from fornax.config.errors import CheckpointError

__all__ = [
    "checksums",
    "claim",
    "complete_steps",
    "delete_step",
    "find_damage",
    "remove_leftovers",
    "step_path",
]

_STEP = re.compile(r"(\d+)(\.orbax-checkpoint-tmp.*)?")
_CLAIM = "fornax-checkpoints"
_BLOCK = 1 << 22


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
            mark.write_text("Checkpoints of a Fornax run, one directory a step.\n")
        probe = root / f".writable.{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise CheckpointError(
            f"cannot write checkpoints to {root} ({error.strerror or error}); choose a directory "
            "that can be written"
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
    return {
        name: _measure(directory / name)
        for name in _files(directory)
        if zlib.crc32(name.encode()) % processes == process
    }


def _files(directory: Path) -> Iterator[str]:
    records = re.compile(r"fornax\.\d+\.(json|tmp)")
    for parent, _, names in os.walk(directory):
        for name in names:
            relative = str((Path(parent) / name).relative_to(directory))
            if not records.fullmatch(relative):
                yield relative


def _measure(path: Path) -> tuple[int, int]:
    size, crc = 0, 0
    with path.open("rb", buffering=0) as file:
        while block := file.read(_BLOCK):
            size += len(block)
            crc = zlib.crc32(block, crc)
    return size, crc


def find_damage(
    directory: Path, expected: Mapping[str, tuple[int, int]], *, contents: bool
) -> str | None:
    """The first file that is not as it was saved, in words; None when all are.

    Args:
      directory: a step's directory.
      expected: size and CRC-32 by path.
      contents: read the files and compare checksums; else compare sizes only.
    """
    for name, (size, crc) in expected.items():
        path = directory / name
        try:
            found = path.stat().st_size
            if found != size:
                return f"{path} has {found} bytes instead of {size}"
            if contents and _measure(path)[1] != crc:
                return f"{path} has other contents than were saved (CRC-32 differs)"
        except FileNotFoundError:
            return f"{path} is missing"
        except OSError as error:
            return f"{path} cannot be read ({error.strerror})"
    return None
