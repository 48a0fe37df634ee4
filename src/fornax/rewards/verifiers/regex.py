"""Does the completion match a regular expression? The pool's time limit ends a slow search."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fornax.config.errors import ConfigError

__all__ = ["TABLE", "RegexOptions"]


@dataclass(frozen=True, kw_only=True)
class RegexOptions:
    """How the verifier `regex` looks."""

    pattern: str | None = None
    """The expression, in Python's syntax; null reads it from each line's column."""
    column: str = "pattern"
    """The column with the expression, where there is no pattern."""
    whole: bool = False
    """Whether all of the completion must match, without white space around it."""
    ignore_case: bool = False
    """Whether upper and lower case are one."""
    multiline: bool = False
    """Whether ^ and $ match at each line, and a dot matches a line's end."""


def _regex(options: RegexOptions) -> tuple[Callable[..., float], tuple[str, ...]]:
    flags = re.IGNORECASE if options.ignore_case else re.NOFLAG
    flags |= re.MULTILINE | re.DOTALL if options.multiline else re.NOFLAG
    if options.pattern is not None:
        try:
            re.compile(options.pattern, flags)
        except re.error as error:
            raise ConfigError(
                f"pattern={options.pattern!r} is not a regular expression: {error}"
            ) from error

    def verify(prompt: Any, completion: str, **record: Any) -> float:
        del prompt
        pattern = record[options.column] if options.pattern is None else options.pattern
        compiled = re.compile(pattern, flags)
        found = (
            compiled.fullmatch(completion.strip()) if options.whole else compiled.search(completion)
        )
        return float(found is not None)

    return verify, (options.column,) if options.pattern is None else ()


TABLE = {"regex": (RegexOptions, _regex)}
