"""Finds reasoning and tool calls in the text of a chat's choice."""

from typing import Any

__all__ = ["ChatText"]


class ChatText:
    """Reads one choice's text as it comes."""

    called = False
    """Whether a tool was called."""

    def push(self, text: str) -> list[dict[str, Any]]:
        """The deltas that new text makes."""
        return [{"content": text}] if text else []

    def finish(self) -> list[dict[str, Any]]:
        """The deltas of what was held back."""
        return []

    def whole(self, text: str) -> dict[str, Any]:
        """The message that a whole text makes."""
        return {"content": text}
