"""The one way to files of the folder of runs: what leads out of it, and what is not a file, is not
there."""

import os
import stat
from pathlib import Path

__all__ = ["Folder"]


class Folder:
    """A folder out of which no path leads, through `..` or symbolic links either.

    Links may lead from one place in it to another. Every error of a file that changes, or goes,
    while it is read is an `OSError`.
    """

    def __init__(self, root: Path) -> None:
        """A folder that is there."""
        self.root = os.path.realpath(root)
        self._below = self.root.rstrip("/") + "/"

    def resolve(self, path: str | Path) -> str | None:
        """The real path of what is in the folder; None for what is outside of it."""
        try:
            real = os.path.realpath(path)
        except (OSError, ValueError):  # a NUL byte
            return None
        return real if real == self.root or real.startswith(self._below) else None

    def open(self, path: str | Path) -> int:
        """A descriptor to read a regular file of the folder with.

        Raises:
          OSError: there is none, or it cannot be read.
        """
        real = self.resolve(path)
        if real is None:
            raise FileNotFoundError(2, "not in the folder of runs", str(path))
        # A pipe would wait for its writer; a link that was put there just now is not followed.
        descriptor = os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise FileNotFoundError(2, "not a file", str(path))
        return descriptor

    def stat(self, path: str | Path) -> os.stat_result | None:
        """Of a regular file of the folder; None where there is none."""
        real = self.resolve(path)
        try:
            found = None if real is None else os.lstat(real)
        except OSError:
            return None
        return found if found is not None and stat.S_ISREG(found.st_mode) else None

    def read(self, path: str | Path, most: int, *, end: bool = False) -> bytes:
        """At most this many bytes from the beginning, or of the end, of a file.

        Raises:
          OSError: there is none, or it cannot be read.
        """
        descriptor = self.open(path)
        try:
            at = max(0, os.fstat(descriptor).st_size - most) if end else 0
            parts = []
            while most > 0 and (part := os.pread(descriptor, most, at)):
                parts.append(part)
                at, most = at + len(part), most - len(part)
        finally:
            os.close(descriptor)
        return b"".join(parts)

    def text(self, path: str | Path, most: int) -> str | None:
        """The beginning of a file as text; None where it cannot be read."""
        try:
            return self.read(path, most).decode("utf-8", "replace")
        except OSError:
            return None
