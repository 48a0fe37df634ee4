"""Tool calls that a model writes as JSON, between markers or by themselves."""

import json
from dataclasses import dataclass, field

from fornax.llm.text.parsing import Arguments, Content, Event, Start, split

__all__ = ["JsonToolParser", "JsonToolStyle", "NamedToolParser", "ObjectReader"]


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


_AFTER = " \t\r\n],;"
_BETWEEN = _AFTER + "["
_ARGUMENTS = ("arguments", "parameters")


@dataclass(frozen=True)
class JsonToolStyle:
    """How a family writes its calls.

    A call is an object with `name` and `arguments` (or `parameters`). Several follow each other,
    with nothing but white space, commas, semicolons and brackets between them.
    """

    begin: str = ""
    """Marks the first call, or every call; empty when there is no marker."""
    end: str = ""
    """Marks the end of calls; empty when they continue to the end of the text."""
    bare: bool = False
    """Whether a text that begins with an object, or a list, begins with a call."""
    named: bool = False
    """Whether the name may come before the object, which is then the arguments."""
    separator: str = ""
    """What stands between such a name and its arguments, if anything."""


class JsonToolParser:
    """Streams names and arguments as they come."""

    def __init__(self, style: JsonToolStyle):
        self._style = style
        self._held = ""
        self._in_calls = False
        self._fresh = True
        self._space = ""
        self._count = 0
        self._object: ObjectReader | None = None
        self._name: str | None = None
        self._known = ""
        self._sent = 0
        self._started = False

    def push(self, text: str) -> list[Event]:
        """What new text yields."""
        text, self._held = self._held + text, ""
        events: list[Event] = []
        while text:
            if self._object is not None:
                text = self._read_object(self._object, text, events)
            elif self._in_calls:
                text = self._read_between(text, events)
            else:
                text = self._read_content(text, events)
        return events

    def finish(self) -> list[Event]:
        """What was held back; a call cut before its name was known is content."""
        events: list[Event] = []
        if self._object is not None and not self._started:
            self._emit_text((self._name or "") + self._object.text, events)
        self._emit_text(self._held, events)
        self._object, self._held = None, ""
        return events

    def _emit_text(self, text: str, events: list[Event]) -> None:
        """Content; white space only between calls is dropped."""
        text = self._space + text
        self._space = ""
        if self._count and not text.strip():
            self._space = text
        elif text:
            events.append(Content(text))

    def _read_content(self, text: str, events: list[Event]) -> str:
        style = self._style
        if self._fresh and style.bare:
            start = text.lstrip()
            if not start:
                self._held = text
                return ""
            if start[0] in "{[":
                self._in_calls, self._fresh = True, False
                return start
        found = split(text, [style.begin] if style.begin else [])
        if found.before:
            self._fresh = False
            self._emit_text(found.before, events)
        if found.marker is None:
            self._held = found.after
            return ""
        self._in_calls, self._fresh = True, False
        return found.after

    def _read_between(self, text: str, events: list[Event]) -> str:
        """Between objects: to the next object, or out of the calls."""
        style = self._style
        rest = text.lstrip(_AFTER)
        markers = [marker for marker in (style.begin, style.end) if marker]
        for marker in markers:
            if rest.startswith(marker):
                self._in_calls = marker == style.begin
                return rest[len(marker) :]
        if rest and any(marker.startswith(rest) for marker in markers):
            self._held = rest
            return ""
        rest = rest.lstrip(_BETWEEN)
        if not rest:
            return ""
        if rest[0] == "{":
            self._object, self._sent, self._started = ObjectReader(), 0, False
            return rest
        if style.named and "{" in rest:
            name, brace, rest = rest.partition("{")
            self._name = name.removesuffix(style.separator).strip()
            self._object, self._sent, self._started = ObjectReader(), 0, False
            return brace + rest
        if style.named:
            self._held = rest
            return ""
        self._in_calls = False
        return rest

    def _read_object(self, reader: ObjectReader, text: str, events: list[Event]) -> str:
        rest = reader.push(text)
        if self._name is not None:
            self._send(self._name, reader.text, events)
        else:
            self._send_members(reader, events)
        if reader.done:
            self._count += self._started
            if not self._started:
                self._emit_text(reader.text, events)
            self._object = self._name = None
        return rest

    def _send_members(self, reader: ObjectReader, events: list[Event]) -> None:
        name = self._known if self._started else _loads(reader.value("name"))
        if not isinstance(name, str):
            return None
        for key in _ARGUMENTS:
            whole = reader.value(key)
            if whole is not None:
                return self._send(name, _as_object(whole), events)
            if reader.open_value is not None and reader.open_value[0] == key:
                return self._send(name, _begun_object(reader.text, reader.open_value[1]), events)
        return self._send(name, "{}" if reader.done else "", events)

    def _send(self, name: str, arguments: str, events: list[Event]) -> None:
        """The call's start, once, and what is new of its arguments."""
        if not self._started:
            self._started, self._known = True, name
            events.append(Start(self._count, name))
        if len(arguments) > self._sent:
            events.append(Arguments(self._count, arguments[self._sent :]))
            self._sent = len(arguments)


class NamedToolParser:
    """The whole text is the arguments of one function: tool_choice names it."""

    def __init__(self, name: str):
        self._start: list[Event] = [Start(0, name)]

    def push(self, text: str) -> list[Event]:
        """What new text yields."""
        events, self._start = self._start, []
        return [*events, Arguments(0, text)] if text else events

    def finish(self) -> list[Event]:
        """Nothing is held back."""
        return []


def _begun_object(text: str, start: int) -> str:
    """An object's text so far; nothing for another value, and no white space that may follow it."""
    part = text[start:].strip()
    return part if part[:1] == "{" else ""


def _loads(text: str | None) -> object:
    if text is None:
        return None
    try:
        return json.loads(text, strict=False)
    except ValueError:
        return None


def _as_object(value: str) -> str:
    """Arguments as an object's text; some models write that text as a string."""
    if value.startswith("{"):
        return value
    inner = _loads(value)
    return inner if isinstance(inner, str) and inner.strip() else "{}"
