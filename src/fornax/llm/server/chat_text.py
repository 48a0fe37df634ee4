"""Takes reasoning and tool calls out of the text of a chat's choice."""

import secrets
from collections.abc import Iterable
from typing import Any

from fornax.llm.text.reasoning import Reasoned, ReasoningParser
from fornax.llm.text.tools import Arguments, Content, Event, Start, ToolParser, gather

__all__ = ["ChatText"]


class ChatText:
    """Reads one choice's text as it comes; without parsers all of it is content."""

    def __init__(
        self,
        reasoning: ReasoningParser | None,
        tools: ToolParser | None,
        *,
        shows_reasoning: bool,
        parallel: bool,
        short_ids: bool,
    ):
        """`parallel` False keeps the first call only; `short_ids` makes ids as Mistral's are."""
        self._reasoning = reasoning
        self._tools = tools
        self._shows_reasoning = shows_reasoning
        self._parallel = parallel
        self._short_ids = short_ids
        self.called = False
        """Whether a tool was called."""

    def push(self, text: str) -> list[dict[str, Any]]:
        """The deltas that new text makes."""
        read = Reasoned("", text) if self._reasoning is None else self._reasoning.push(text)
        return self._thoughts(read.reasoning) + self._deltas(self._events(read.content))

    def finish(self) -> list[dict[str, Any]]:
        """The deltas of what was held back."""
        read = Reasoned("", "") if self._reasoning is None else self._reasoning.finish()
        events = self._events(read.content)
        if self._tools is not None:
            events += self._allowed(self._tools.finish())
        return self._thoughts(read.reasoning) + self._deltas(events)

    def whole(self, text: str) -> dict[str, Any]:
        """The message that a whole text makes."""
        reasoning = ""
        if self._reasoning is not None:
            first, last = self._reasoning.push(text), self._reasoning.finish()
            reasoning, text = first.reasoning + last.reasoning, first.content + last.content
        message: dict[str, Any] = {"content": text}
        if reasoning and self._shows_reasoning:
            message["reasoning"] = reasoning
        if self._tools is None:
            return message
        content, calls = gather(self._events(text) + self._allowed(self._tools.finish()))
        message["content"] = content
        if calls:
            self.called = True
            message["content"] = content if content.strip() else None
            message["tool_calls"] = [
                {
                    "id": self._id(),
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in calls
            ]
        return message

    def _events(self, text: str) -> list[Event]:
        if not text:
            return []
        return [Content(text)] if self._tools is None else self._allowed(self._tools.push(text))

    def _allowed(self, events: Iterable[Event]) -> list[Event]:
        if self._parallel:
            return list(events)
        return [event for event in events if isinstance(event, Content) or event.index == 0]

    def _thoughts(self, text: str) -> list[dict[str, Any]]:
        return [{"reasoning": text}] if text and self._shows_reasoning else []

    def _deltas(self, events: Iterable[Event]) -> list[dict[str, Any]]:
        return [delta for event in events if (delta := self._delta(event)) is not None]

    def _delta(self, event: Event) -> dict[str, Any] | None:
        match event:
            case Content(text):
                return {"content": text} if text else None
            case Start(index, name):
                self.called = True
                function = {"name": name, "arguments": ""}
                call = {"index": index, "id": self._id(), "type": "function", "function": function}
                return {"tool_calls": [call]}
            case Arguments(index, text):
                return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}

    def _id(self) -> str:
        """A call's id; Mistral's templates take only nine letters and digits."""
        return secrets.token_hex(5)[:9] if self._short_ids else f"call_{secrets.token_hex(12)}"
