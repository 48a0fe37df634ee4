"""What reading a text for tool calls yields."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

__all__ = ["Arguments", "Call", "Content", "Event", "Start", "ToolParser", "gather"]


@dataclass(frozen=True, slots=True)
class Content:
    """Text that is no call."""

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
