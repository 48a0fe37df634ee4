"""Find markers in a text that comes in pieces, without sending half of one."""

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Split", "split"]


class Split(NamedTuple):
    """A text around the first marker in it."""

    before: str
    """Text that is surely none of a marker."""
    marker: str | None
    after: str
    """What follows the marker; without one, the end of the text that may begin one."""


def split(text: str, markers: Sequence[str]) -> Split:
    """Cut a text at the first of the markers, or before what may become one."""
    found = [(text.find(marker), -len(marker), marker) for marker in markers if marker in text]
    if found:
        place, _, marker = min(found)
        return Split(text[:place], marker, text[place + len(marker) :])
    longest = max(map(len, markers), default=1) - 1
    for place in range(max(0, len(text) - longest), len(text)):
        if any(marker.startswith(text[place:]) for marker in markers):
            return Split(text[:place], None, text[place:])
    return Split(text, None, "")
