"""Reading a model's text as it comes: the events of tool calls, and how to cut text at markers."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

__all__ = ["Arguments", "Call", "Content", "Event", "Start", "ToolParser", "gather", "split"]


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


@dataclass(frozen=True, slots=True)
class Content:
    """Text that is not a call."""

    text: str


@dataclass(frozen=True, slots=True)
class Start:
    """A call begins."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of the arguments' JSON text of a call that has begun."""

    index: int
    text: str


Event = Content | Start | Arguments


@dataclass(frozen=True, slots=True)
class Call:
    """A whole call; `arguments` is JSON text as the model wrote it."""

    name: str
    arguments: str


class ToolParser(Protocol):
    """Reads one choice's text; the events do not depend on how the text was cut."""

    def push(self, text: str) -> list[Event]:
        """What new text yields."""
        ...

    def finish(self) -> list[Event]:
        """What was held back."""
        ...


def gather(events: Iterable[Event]) -> tuple[str, list[Call]]:
    """The content and the calls that events amount to."""
    content: list[str] = []
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    for event in events:
        match event:
            case Content(text):
                content.append(text)
            case Start(index, name):
                names[index], arguments[index] = name, ""
            case Arguments(index, text):
                arguments[index] += text
    return "".join(content), [Call(names[index], arguments[index]) for index in names]
