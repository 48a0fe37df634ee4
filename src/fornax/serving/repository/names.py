"""What may be the name of a model and of a version, so that a name is never a path."""

import os
import re
from pathlib import Path

from fornax.serving.settings import LARGEST_VERSION

__all__ = ["inside", "name_problem", "printable", "version_number"]

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}\Z")
_NUMBER = re.compile(r"[1-9][0-9]{0,18}\Z")


def name_problem(name: str) -> str:
    """Why this is no name of a model; empty when it is one."""
    if _NAME.match(name):
        return ""
    return (
        f"{printable(name)} is no model name; use up to 128 letters, digits, _ . and -, "
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
