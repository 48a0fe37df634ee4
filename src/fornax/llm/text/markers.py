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
    place = min((_begun(text, marker) for marker in markers), default=len(text))
    return Split(text[:place], None, text[place:])


def _begun(text: str, marker: str) -> int:
    """Where the text's end begins to spell the marker; its length when it does not."""
    place = text.find(marker[0], max(0, len(text) - len(marker) + 1))
    while place >= 0 and not marker.startswith(text[place:]):
        place = text.find(marker[0], place + 1)
    return place if place >= 0 else len(text)
