"""A function of the user's own by its name: FILE.py:NAME, or package.module:NAME."""

import contextlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from fornax.config.errors import ConfigError, FornaxError
from fornax.config.place import nearest

__all__ = ["load_name", "mending"]

_SHOWN = 10


def load_name(name: str) -> Callable[..., Any]:
    """Import the file or module and return its function.

    The file's folder is on the import path, as when Python runs it.

    Raises:
      ConfigError: a file or function that is not there, or what importing it raises.
    """
    place, _, attribute = name.rpartition(":")
    if not place or not attribute:
        raise ConfigError(f"{name} names no function; write FILE.py:NAME")
    module = _from_file(place) if place.endswith(".py") else _from_path(place)
    found = getattr(module, attribute, None)
    if not callable(found):
        has = [k for k, v in vars(module).items() if callable(v) and not k.startswith("_")]
        guess = nearest(attribute, has)
        some = ", ".join(has[:_SHOWN]) + (f" and {len(has) - _SHOWN} more" if has[_SHOWN:] else "")
        hint = f"; did you mean {guess}?" if guess else f"; it has {some or 'none'}"
        raise ConfigError(f"{place} has no function {attribute}{hint}")
    return found


def _from_path(place: str) -> ModuleType:
    with mending(place):
        return importlib.import_module(place)


def _from_file(place: str) -> ModuleType:
    path = Path(place).expanduser().resolve()
    if not path.is_file():
        raise ConfigError(f"there is no file {place}; check the path")
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with mending(place):
        spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def mending(name: str, *, always: bool = False) -> Iterator[None]:
    """What the user's own code raises is theirs to mend, and is told with its place.

    Raises:
      ConfigError: for an exception that passed through code outside Fornax and its libraries, or
        `always`, where a library's code stands in for the user's.
    """
    try:
        yield
    except FornaxError:
        raise
    except Exception as error:
        place = _place(error)
        if place is None and not always and not isinstance(error, ImportError | SyntaxError):
            raise
        said = " ".join(str(error).split())[:300]
        where = f" at {place}" if place else ""
        raise ConfigError(f"{name} raises {type(error).__name__}{where}: {said}") from error


def _place(error: BaseException) -> str | None:
    """The last line of the user's code that the exception passed through."""
    ours = str(Path(__file__).resolve().parents[1])
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        libraries = "site-packages" in frame.filename or frame.filename.startswith((ours, "<"))
        if not libraries and not frame.filename.startswith(sys.base_prefix + "/lib"):
            return f"{frame.filename}:{frame.lineno}"
    return None
