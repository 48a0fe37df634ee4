"""Small files of a repository, read without trusting them and written whole or not at all."""

import json
import os
import stat
import tempfile
from pathlib import Path
from typing import Any

from fornax.config import ServingCode, ServingError
from fornax.export.files import sync
from fornax.serving.repository.names import inside

__all__ = ["read_small", "write_json"]


def read_small(root: Path, path: Path, limit: int) -> bytes:
    """Read a regular file that lies, links followed, under `root`.

    Raises:
      FileNotFoundError: there is none.
      ServingError: it leads out of the repository, is no regular file, or is over `limit` bytes.
      OSError: it cannot be read.
    """
    real = inside(root, path)
    if real is None:
        raise _refused(f"{path} is a link that leads out of the repository; put a file there")
    # A pipe would hold the reader for ever without O_NONBLOCK.
    descriptor = os.open(real, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise _refused(f"{path} is no regular file; put a file there")
        content = file.read(limit + 1)
    if len(content) > limit:
        raise _refused(f"{path} has over {limit} bytes, more than such a file may have")
    return content


def write_json(path: Path, value: Any) -> None:
    """Put a JSON file in its place so that a reader, or a crash, sees the old or the new one.

    Raises:
      OSError: the folder cannot be written.
    """
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with open(handle, "w", encoding="utf-8") as file:
            json.dump(value, file)
            file.write("\n")
            file.flush()
            os.fchmod(handle, 0o644)
            os.fsync(handle)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
    sync(path.parent)


def _refused(message: str) -> ServingError:
    return ServingError(ServingCode.FAILED_PRECONDITION, message)
