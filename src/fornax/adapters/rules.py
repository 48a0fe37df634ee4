"""Patterns over module paths, and errors for patterns that find nothing.

A pattern is the end of a path: `attention/q` finds `layers/attention/q`. Each part is a glob. What
holds other modules (`attention`) stands for all in it.
"""

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from fornax.config.errors import ConfigError
from fornax.config.suggest import first_few, similar

__all__ = ["first_match", "matches", "select"]

_SHOWN = 8
T = TypeVar("T")


def matches(pattern: str, path: str) -> bool:
    """Whether the pattern finds the module, or one that holds it."""
    wanted = pattern.strip("/").split("/")
    parts = path.split("/")
    ends = range(len(wanted), len(parts) + 1)
    return any(_fits(wanted, parts[end - len(wanted) : end]) for end in ends)


def _fits(wanted: Sequence[str], parts: Sequence[str]) -> bool:
    return all(fnmatch.fnmatchcase(part, one) for one, part in zip(wanted, parts, strict=True))


def first_match(table: Mapping[str, T], path: str, default: T) -> T:
    """The value of the first pattern of a table that finds the module."""
    return next((value for pattern, value in table.items() if matches(pattern, path)), default)


def select(
    patterns: Iterable[str], adaptable: Sequence[str], others: Mapping[str, str], *, where: str
) -> list[str]:
    """The paths that at least one pattern finds.

    Args:
        patterns: what is wanted.
        adaptable: paths that may be had.
        others: further paths of the model, each with what it is.
        where: name of the setting that the patterns are from.

    Raises:
        ConfigError: for a pattern that finds none of `adaptable`.
    """
    patterns = list(patterns)
    for pattern in patterns:
        if not any(matches(pattern, path) for path in adaptable):
            raise ConfigError(_missed(where, pattern, adaptable, others))
    return [path for path in adaptable if any(matches(p, path) for p in patterns)]


def _missed(where: str, pattern: str, adaptable: Sequence[str], others: Mapping[str, str]) -> str:
    found = [f"{path} ({what})" for path, what in others.items() if matches(pattern, path)]
    start = f"{where} {pattern!r} matches no module that can be adapted"
    if found:
        start += f", only {first_few(found, _SHOWN)}"
    if not adaptable:
        return f"{start}; the model has no linear modules"
    literal = pattern.replace("*", "").replace("?", "").replace("_proj", "").strip("/")
    near = similar(literal, adaptable)
    if near:
        return f"{start}; near it are {first_few(near, _SHOWN)}"
    return f"{start}; those that can be are {first_few(adaptable, _SHOWN)}"
