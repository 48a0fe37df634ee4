"""The file that holds a model at a version after a rollback, across restarts."""

import json
import os
from pathlib import Path

from fornax.config import ServingCode, ServingError
from fornax.export.files import sync
from fornax.serving.repository.files import read_small, write_json
from fornax.serving.repository.names import name_problem, version_number

__all__ = ["PIN_FILE", "pin", "read_pin", "unpin"]

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
            f'{path} does not name a version; it reads {{"version": "3"}}. Mend or remove it',
        )
    return number


def pin(root: str | os.PathLike[str], name: str, version: int) -> None:
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
    write_json(folder / PIN_FILE, {"version": str(version)})


def unpin(root: str | os.PathLike[str], name: str) -> bool:
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


def _folder(root: str | os.PathLike[str], name: str) -> Path:
    folder = Path(root) / name
    if problem := name_problem(name):
        raise ServingError(ServingCode.INVALID_ARGUMENT, problem)
    if not folder.is_dir():
        raise ServingError(ServingCode.NOT_FOUND, f"{root} has no model {name}; check the name")
    return folder
