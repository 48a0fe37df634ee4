"""Files of one JSON object per line: appended line by line, whole lines only survive a kill."""

import json
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fornax.config.errors import FornaxError
from fornax.config.files import is_full, write_whole

__all__ = ["JsonLines", "append_json_line", "keep_json_lines", "read_json_lines", "refused"]


_MOST_WAITING = 1 << 24


class JsonLines:
    """Appends objects; each line reaches the operating system before `write` returns.

    On a full disk lines wait in memory, 16 MB at most, and are written when there is room again.
    """

    def __init__(self, path: Path) -> None:
        """Open `path` for appending, dropping the torn last line that a kill may have left."""
        self.path = path
        keep_json_lines(path, lambda _: True)
        try:
            self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        except OSError as error:
            raise refused(path, error) from error
        self._waiting = b""

    def write(self, record: Mapping[str, object]) -> None:
        """Append one line; numbers that are not finite become null.

        Raises:
          FornaxError: when the disk refuses, or has been full for long.
        """
        finite = {key: _json_number(value) for key, value in record.items()}
        self._waiting += (json.dumps(finite, allow_nan=False) + "\n").encode()
        self._write(most=_MOST_WAITING)

    def close(self) -> None:
        """Close the file.

        Raises:
          FornaxError: when the disk is full still, and lines are lost.
        """
        try:
            self._write(most=0)
        finally:
            os.close(self._descriptor)

    def _write(self, *, most: int) -> None:
        """Write what waits; on a full disk this many bytes may stay."""
        try:
            while self._waiting:
                self._waiting = self._waiting[os.write(self._descriptor, self._waiting) :]
        except OSError as error:
            if not is_full(error) or len(self._waiting) > most:
                raise refused(self.path, error) from error


def append_json_line(path: Path, record: Mapping[str, object]) -> None:
    """Append one object and the time to a file that another process may hold open as `JsonLines`.

    Raises:
      OSError: when there is no such file, or the disk refuses.
    """
    line = json.dumps({"time": round(time.time(), 3), **record}) + "\n"
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file, in order; none when the file is missing."""
    if not path.exists():
        return []
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
        if not line.endswith("\n"):
            break
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


def keep_json_lines(path: Path, keep: Callable[[dict[str, Any]], bool]) -> None:
    """Rewrite a file to the whole lines that `keep` accepts, in one atomic replacement.

    Raises:
      FornaxError: when the disk refuses.
    """
    if not path.exists():
        return
    text = "".join(json.dumps(r) + "\n" for r in read_json_lines(path) if keep(r))
    if text.encode() == path.read_bytes():
        return
    try:
        write_whole(path, text, durable=True)
    except OSError as error:
        raise refused(path, error) from error


def _json_number(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def refused(path: Path, error: OSError) -> FornaxError:
    """What to tell a user whose disk does not take a file of the run."""
    return FornaxError(
        f"cannot write {path}: {error.strerror or error}; make room or make it writable, then run "
        "the same command again: it continues from the last checkpoint"
    )
