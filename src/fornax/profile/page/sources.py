"""The lines of Python around what asked for an operation, where this machine still has them."""

import re
from collections.abc import Iterable
from importlib import resources
from pathlib import Path

import fornax

__all__ = ["excerpts"]

_PLACE = re.compile(r"(?P<file>.+\.py):(?P<line>\d+)")
_PACKAGE = Path(str(resources.files("fornax"))).resolve()
_PACKAGES = _PACKAGE.parent
_AROUND = 4
_MOST = 400
"""Excerpts of one page, those of the longest operations."""


def excerpts(
    sources: Iterable[str], *, before: float, version: str, own_only: bool = False
) -> dict[str, tuple[int, list[str]]]:
    """Lines around each place.

    Only Python files are opened, and none that was written to after the capture, since its lines
    may have moved.

    Args:
      sources: places such as "fornax/models/mlp.py:54 (MLP.__call__)", the most important first.
      before: when the capture began, in seconds since 1970.
      version: of Fornax in the capture; lines of another one here are not shown.
      own_only: open Fornax's own files only: a capture names any it likes.

    Returns:
      Place -> the number of the first line, and lines; places that cannot be read are left out.
    """
    found: dict[str, tuple[int, list[str]]] = {}
    files: dict[Path, list[str]] = {}
    for source in dict.fromkeys(sources):
        place = _PLACE.match(source)
        if place is None or len(found) == _MOST:
            continue
        path = Path(place["file"])
        if path.is_absolute():
            if own_only:
                continue
        else:
            path = (_PACKAGES / path).resolve()
            if version != fornax.__version__ or not path.is_relative_to(_PACKAGE):
                continue
        if path not in files:
            files[path] = _lines(path, before)
        first = max(1, int(place["line"]) - _AROUND)
        if part := files[path][first - 1 : int(place["line"]) + _AROUND]:
            found[source] = (first, part)
    return found


def _lines(path: Path, before: float) -> list[str]:
    """Of a file; empty if it cannot be read or was written to later."""
    try:
        if path.stat().st_mtime > before:
            return []
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeError):
        return []
