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
from fornax.config.suggest import did_you_mean, first_few, nearest

__all__ = ["load_module", "load_name", "load_object", "user_errors"]


def load_name(name: str) -> Callable[..., Any]:
    """Import FILE.py:NAME or package.module:NAME and return that function or class.

    Raises:
      ConfigError: as `load_object`, or for what cannot be called.
    """
    found = load_object(name)
    if not callable(found):
        raise ConfigError(f"{name} is a {type(found).__name__}, not a function")
    return found


def load_object(name: str) -> Any:
    """Import FILE.py:NAME or package.module:NAME; NAME may have dots.

    Raises:
      ConfigError: a file or name that is not there, with the nearest, or what importing it raises.
    """
    place, _, attribute = name.rpartition(":")
    if not place or not attribute:
        raise ConfigError(f"{name} names no function; write FILE.py:NAME or package.module:NAME")
    found: Any = load_module(place)
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise _missing(found, place, attribute)
        found = getattr(found, part)
    return found


def load_module(place: str) -> ModuleType:
    """Import a file, once, or a dotted module.

    The file's folder is on the import path, as when Python runs it.

    Raises:
      ConfigError: a file that is not there, or what importing it raises.
    """
    if not place.endswith(".py"):
        with user_errors(place, always=True):
            return importlib.import_module(place)
    path = Path(place).expanduser().resolve()
    if not path.is_file():
        beside = [p.name for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
        guess = nearest(path.name, beside)
        hint = f"did you mean {guess}?" if guess else "check the path"
        raise ConfigError(f"there is no file {place}; {hint}")
    name = f"fornax_user_{path.stem}"
    if name in sys.modules and sys.modules[name].__file__ == str(path):
        return sys.modules[name]
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        with user_errors(place, always=True):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _missing(found: object, place: str, attribute: str) -> ConfigError:
    has = [k for k, v in vars(found).items() if callable(v) and not k.startswith("_")]
    hint = did_you_mean(attribute, has, f"it has {first_few(has, 10) or 'none'}")
    return ConfigError(f"{place} has no function {attribute}; {hint}")


@contextlib.contextmanager
def user_errors(name: str, *, always: bool = False) -> Iterator[None]:
    """What the user's own code raises is theirs to fix, and is reported with its place.

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
