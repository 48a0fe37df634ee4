"""Messages as chat templates want them: plain JSON, parts of text joined or kept."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fornax.config.errors import EngineError

__all__ = ["Content", "Final", "mark_final", "plain", "prepare"]

Content = Literal["text", "parts", "both"]
"""What a template takes as a message's content."""

_REASONING = ("reasoning_content", "thinking", "reasoning")
_MARK = "\ue000the end of the final message "
"""Ends in a space: a template that trims the content shows it by taking that away."""


def plain(value: Any) -> Any:
    """A copy out of JSON's own types: a template must see no object with methods of its own."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str | int | float):
        return next(kind(value) for kind in (str, int, float) if isinstance(value, kind))
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [plain(item) for item in value]
    raise EngineError(f"a chat template takes JSON, but was given a {type(value).__name__}")


def prepare(messages: Sequence[Mapping[str, Any]], content: Content) -> list[dict[str, Any]]:
    """Messages for a template. Raises `EngineError` for none, and for content that is not text."""
    if not messages:
        raise EngineError("messages is empty; give at least one")
    return [_prepare(message, content) for message in messages]


def _prepare(message: Mapping[str, Any], content: Content) -> dict[str, Any]:
    made = plain(message)
    if not isinstance(made, dict) or not isinstance(made.get("role"), str):
        raise EngineError(f"a message must be an object with a role, but one is {message!r}")
    if isinstance(made.get("content"), list):
        parts = [_part(part) for part in made["content"]]
        made["content"] = "\n".join(part["text"] for part in parts) if content == "text" else parts
    elif content == "parts" and isinstance(made.get("content"), str):
        made["content"] = [{"type": "text", "text": made["content"]}]
    if made.get("tool_calls"):
        made["tool_calls"] = [_tool_call(call) for call in made["tool_calls"]]
    reasoning = next((made[key] for key in _REASONING if made.get(key) is not None), None)
    if reasoning is not None:
        made = {"thinking": reasoning, **made, "reasoning_content": reasoning}
    return made


def _part(part: Any) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "refusal":
        part = {"type": "text", "text": part.get("refusal")}
    elif kind != "text":
        raise EngineError(f"content of type {kind} is not supported: the model reads text")
    if not isinstance(part.get("text"), str):
        raise EngineError(f"a part of a message's content has text={part.get('text')!r}; give text")
    return part


def _tool_call(call: Any) -> Any:
    """A call whose arguments are an object: templates write the JSON themselves."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    text = function["arguments"]
    try:
        arguments = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError) as error:
        raise EngineError(
            f"tool_calls: arguments of {function.get('name')!r} are no JSON ({error})"
        ) from error
    return {**call, "function": {**function, "arguments": arguments}}


@dataclass(frozen=True)
class Final:
    """The last message's text, to be found again in the prompt."""

    text: str

    def cut(self, prompt: str) -> str:
        """The prompt up to the end of the last message's text."""
        place = prompt.rfind(_MARK.strip())
        if place < 0 or self.text.strip() not in prompt:
            raise EngineError(
                "continue_final_message: the chat template does not show the final message's "
                "content as it is; leave continue_final_message out"
            )
        kept = prompt[place : place + len(_MARK)] == _MARK
        return prompt[:place] if kept else prompt[:place].rstrip()


def mark_final(messages: list[dict[str, Any]]) -> Final:
    """Mark where the last message's text ends. Raises `EngineError` when it has none."""
    content = messages[-1].get("content")
    if isinstance(content, str):
        messages[-1]["content"] = content + _MARK
        return Final(content)
    if isinstance(content, list) and content:
        text = content[-1]["text"]
        content[-1] = {**content[-1], "text": text + _MARK}
        return Final(text)
    raise EngineError("continue_final_message: the final message has no content to go on with")
