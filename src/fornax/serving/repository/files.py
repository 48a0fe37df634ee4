"""Names and small files of a repository: not trusted when read, written whole or not at all."""

import json
import os
import re
import stat
from pathlib import Path

from fornax.config import ServingCode, ServingError
from fornax.config.files import sync, write_whole
from fornax.serving.settings import LARGEST_VERSION

__all__ = [
    "PIN_FILE",
    "inside",
    "name_problem",
    "pin",
    "printable",
    "read_pin",
    "read_small",
    "unpin",
    "version_number",
]

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}\Z")
_NUMBER = re.compile(r"[1-9][0-9]{0,18}\Z")


def name_problem(name: str) -> str:
    """Why this is not a name of a model; empty when it is one."""
    if _NAME.match(name):
        return ""
    return (
        f"{printable(name)} is not a model name; use up to 128 letters, digits, _ . and -, "
        "beginning with a letter, a digit or _"
    )


def version_number(text: str) -> int | None:
    """The number of a version folder; None for 0, 01, signs, and digits of other scripts."""
    if not _NUMBER.match(text):
        return None
    number = int(text)
    return number if number <= LARGEST_VERSION else None


def printable(name: str) -> str:
    """A file name as text that every protocol can carry."""
    shown = name if name.isprintable() and name.isascii() else ascii(name)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."


def inside(root: Path, path: Path) -> Path | None:
    """The real path, symbolic links followed, if it lies under `root` (itself real)."""
    real = Path(os.path.realpath(path))
    return real if real.is_relative_to(root) and real != root else None


def read_small(root: Path, path: Path, limit: int) -> bytes:
    """Read a regular file that lies, links followed, under `root`.

    Raises:
      FileNotFoundError: there is none.
      ServingError: it leads out of the repository, is not a regular file, or is over `limit` bytes.
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
            raise _refused(f"{path} is not a regular file; put a file there")
        content = file.read(limit + 1)
    if len(content) > limit:
        raise _refused(f"{path} has over {limit} bytes, more than such a file may have")
    return content


def _refused(message: str) -> ServingError:
    return ServingError(ServingCode.FAILED_PRECONDITION, message)


PIN_FILE = "pin.json"


def read_pin(root: Path, folder: Path) -> int | None:
    """The version at which a model's folder is held; None without a pin.

    Raises:
      ServingError: the file is none of ours.
    """
    path = folder / PIN_FILE
    try:
        text = read_small(root, path, 4096)
    except FileNotFoundError:
        return None
    try:
        version = json.loads(text)["version"]
        number = version_number(version) if isinstance(version, str) else None
    except (ValueError, KeyError, TypeError, RecursionError):
        number = None
    if number is None:
        raise ServingError(
            ServingCode.FAILED_PRECONDITION,
            f'{path} does not name a version; it reads {{"version": "3"}}. Fix or remove it',
        )
    return number


def pin(root: Path, name: str, version: int) -> None:
    """Hold a model at a version, in its folder: newer ones are withheld until `unpin`.

    A server that polls the repository follows; a server started later begins so.

    Raises:
      ServingError: no such model or version in the repository.
      OSError: the folder cannot be written.
    """
    folder = _folder(root, name)
    if not (folder / str(version)).is_dir():
        raise ServingError(
            ServingCode.NOT_FOUND,
            f"{name} has no version {version} in {root}; name one of its folders",
        )
    write_whole(folder / PIN_FILE, json.dumps({"version": str(version)}) + "\n", durable=True)


def unpin(root: Path, name: str) -> bool:
    """End what `pin` began; returns whether there was a pin.

    Raises:
      ServingError: no such model.
      OSError: the folder cannot be written.
    """
    folder = _folder(root, name)
    try:
        (folder / PIN_FILE).unlink()
    except FileNotFoundError:
        return False
    sync(folder)
    return True


def _folder(root: Path, name: str) -> Path:
    folder = root / name
    if problem := name_problem(name):
        raise ServingError(ServingCode.INVALID_ARGUMENT, problem)
    if not folder.is_dir():
        raise ServingError(ServingCode.NOT_FOUND, f"{root} has no model {name}; check the name")
    return folder
