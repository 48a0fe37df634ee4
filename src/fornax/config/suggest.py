"""Lists of names in errors: the nearest to a misspelt one, those like a pattern, the first few."""

import difflib
from collections.abc import Iterable, Sequence

__all__ = ["did_you_mean", "first_few", "nearest", "similar"]

_LONGEST = 256


def nearest(word: str, allowed: Iterable[str]) -> str | None:
    """The allowed word closest to a misspelt one, or None where nothing is close."""
    if len(word) > _LONGEST:  # a client's, perhaps: the search takes a step a letter
        return None
    by_lower = {choice.lower(): choice for choice in allowed}
    found = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[found[0]] if found else None


def did_you_mean(word: str, allowed: Iterable[str], otherwise: str | None = None) -> str:
    """`did you mean X? Use one of ...`, or what follows the question alone where nothing is close.

    Args:
      word: the misspelt one.
      allowed: the words that are known.
      otherwise: what follows the question; None for `use one of` and all that is allowed.
    """
    allowed = list(allowed)
    if otherwise is None:
        otherwise = f"use one of {', '.join(allowed)}"
    guess = nearest(word, allowed)
    return f"did you mean {guess}? {otherwise[0].upper()}{otherwise[1:]}" if guess else otherwise


def similar(text: str, paths: Iterable[str]) -> list[str]:
    """Paths like `text` by one of their parts or ends, the most alike first."""

    def likeness(path: str) -> float:
        parts = path.lower().split("/")
        ends = ["/".join(parts[i:]) for i in range(len(parts))]
        return max(difflib.SequenceMatcher(None, text, x).ratio() for x in (*parts, *ends))

    text = text.lower()
    scored = sorted(((likeness(path), path) for path in paths), key=lambda item: -item[0])
    return [path for score, path in scored if score >= 0.5]


def first_few(names: Sequence[str], most: int = 5) -> str:
    """`a, b, c and 4 more`."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
