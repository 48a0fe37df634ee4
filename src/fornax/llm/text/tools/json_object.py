"""Read one JSON object as it comes, and tell where its members' values stand."""

import json
from dataclasses import dataclass, field

__all__ = ["ObjectReader"]


@dataclass(slots=True)
class ObjectReader:
    """The text of an object, fed from its `{` on.

    Attributes: `text`, what was read; `done`, whether its `}` came; `values`, start and end of each
        complete member's value in `text`; `open_value`, key and start of the one being read.
    """

    text: str = ""
    done: bool = False
    values: dict[str, tuple[int, int]] = field(default_factory=dict)
    open_value: tuple[str, int] | None = None
    _depth: int = 0
    _in_string: bool = False
    _escaped: bool = False
    _string_start: int = 0
    _key: str = ""

    def push(self, more: str) -> str:
        """Read on; returns what follows the object."""
        place = len(self.text)
        self.text += more
        for offset, character in enumerate(more):
            if self._in_string:
                self._in_text(character, place + offset)
            else:
                self._between(character, place + offset)
            if self.done:
                self.text = self.text[: place + offset + 1]
                return more[offset + 1 :]
        return ""

    def value(self, key: str) -> str | None:
        """JSON text of a complete member."""
        if key not in self.values:
            return None
        start, end = self.values[key]
        return self.text[start:end].strip()

    def _in_text(self, character: str, place: int) -> None:
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self._in_string = False
            if self._depth == 1 and self.open_value is None:
                self._key = _text(self.text[self._string_start : place + 1])

    def _between(self, character: str, place: int) -> None:
        if character == '"':
            self._in_string, self._string_start = True, place
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            if self._depth == 1:
                self._close_value(place)
            self._depth -= 1
            self.done = self._depth == 0
        elif self._depth == 1 and character == ":" and self.open_value is None:
            self.open_value = (self._key, place + 1)
        elif self._depth == 1 and character == ",":
            self._close_value(place)

    def _close_value(self, end: int) -> None:
        if self.open_value is not None:
            key, start = self.open_value
            self.values[key] = (start, end)
            self.open_value = None


def _text(quoted: str) -> str:
    try:
        return json.loads(quoted, strict=False)
    except ValueError:
        return quoted
