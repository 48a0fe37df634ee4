"""Files of one JSON object a line: appended line by line, whole lines only survive a kill."""

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fornax.config.errors import FornaxError

__all__ = ["JsonLines", "keep_json_lines", "read_json_lines", "refused"]


class JsonLines:
    """Appends objects; each line reaches the operating system before `write` returns."""

    def __init__(self, path: Path) -> None:
        """Open `path` for appending, dropping the torn last line that a kill may have left."""
        self.path = path
        keep_json_lines(path, lambda _: True)
        try:
            self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        except OSError as error:
            raise refused(path, error) from error

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one line; numbers that are not finite become null.

        Raises:
          FornaxError: when the disk refuses.
        """
        finite = {key: _json_number(value) for key, value in record.items()}
        line = (json.dumps(finite, allow_nan=False) + "\n").encode()
        try:
            while line:
                line = line[os.write(self._descriptor, line) :]
        except OSError as error:
            raise refused(self.path, error) from error

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


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
    temporary = path.with_name(path.name + ".new")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise refused(path, error) from error


def _json_number(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def refused(path: Path, error: OSError) -> FornaxError:
    """What to tell a user whose disk does not take a file of the run."""
    return FornaxError(
        f"cannot write {path}: {error.strerror or error}; make room or make it writable, then run "
        "the same command again: it continues from the last checkpoint"
    )
