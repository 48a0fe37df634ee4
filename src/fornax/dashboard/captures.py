"""The captures below a run's `profile/`: which there are, and the files of each."""

import os
from collections.abc import Iterator
from dataclasses import dataclass

from fornax.dashboard.folder import Folder
from fornax.dashboard.runs import Found

__all__ = ["CaptureFound", "find_capture", "list_captures"]

_SPACES = ".xplane.pb"
_TOP = "profile"
_DEEPEST, _MOST_FOLDERS, _MOST_CAPTURES, _MOST_FILES = 5, 2000, 500, 10_000


@dataclass(frozen=True, kw_only=True)
class CaptureFound:
    """The folder of a capture."""

    name: str
    """Its path below `profile/`, with `/` between the parts; `.` for `profile/` itself."""
    path: str
    """The real path, in the folder of runs."""
    files: tuple[tuple[str, int, int], ...]
    """Name, bytes and time of change in nanoseconds of each."""

    @property
    def bytes(self) -> int:
        """Of all files."""
        return sum(size for _, size, _ in self.files)

    @property
    def modified(self) -> float:
        """When a file of it changed last, in seconds since 1970."""
        return max(at for _, _, at in self.files) / 1e9

    @property
    def ranks(self) -> int:
        """How many processes wrote a file of it."""
        return sum(name.endswith(_SPACES) for name, _, _ in self.files)


def list_captures(folder: Folder, run: Found) -> list[CaptureFound]:
    """All captures of a run, the newest first."""
    found = sorted(_captures(folder, run), key=lambda each: (-each.modified, each.name))
    return found[:_MOST_CAPTURES]


def find_capture(folder: Folder, run: Found, name: str) -> CaptureFound | None:
    """The capture of a name; None where the run has none of it."""
    return next((each for each in _captures(folder, run) if each.name == name), None)


def _captures(folder: Folder, run: Found) -> Iterator[CaptureFound]:
    waiting = ["."]
    seen = 0
    while waiting and seen < _MOST_FOLDERS:
        name = waiting.pop()
        seen += 1
        real = folder.resolve(run.path / _TOP / name)
        try:
            listed = sorted(os.scandir(real), key=lambda each: each.name) if real else []
        except OSError:
            continue
        inner = [each for each in listed if _is_folder(each)]
        if name.count("/") + 1 < _DEEPEST:
            waiting += [each.name if name == "." else f"{name}/{each.name}" for each in inner]
        if real and any(each.name.endswith(_SPACES) for each in listed):
            files = _files(folder, listed)
            if files is not None:
                yield CaptureFound(name=name, path=real, files=files)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether it is one, of a plain name; folders behind links are not walked."""
    try:
        plain = entry.name.isprintable() and not entry.name.startswith(".")
        return plain and entry.is_dir(follow_symlinks=False)
    except OSError:
        return False


def _files(
    folder: Folder, listed: list[os.DirEntry[str]]
) -> tuple[tuple[str, int, int], ...] | None:
    """The files of a capture; None where one leads out of the folder of runs, or cannot be read."""
    found = []
    for entry in listed[:_MOST_FILES]:
        if entry.name.endswith((_SPACES, ".json")):
            told = folder.stat(entry.path)
            if told is None:
                return None
            found.append((entry.name, told.st_size, told.st_mtime_ns))
    return tuple(found)
