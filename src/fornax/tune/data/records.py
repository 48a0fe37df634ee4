"""Records of post-training data, and what a conversation must be: OpenAI's messages with tools."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeGuard

from fornax.config.errors import DataError

__all__ = [
    "Chat",
    "Completion",
    "Example",
    "Labelled",
    "Messages",
    "Pair",
    "Prompt",
    "Text",
    "Tools",
    "check_messages",
    "check_tools",
    "is_messages",
]


JsonObject = dict[str, Any]
"""A value of JSON text or of a table's row."""

Variables = Mapping[str, Any]
"""Further variables of a chat template."""

Messages = list[JsonObject]
"""Plain JSON of OpenAI's chat messages."""

Tools = list[JsonObject] | None
"""Function definitions in OpenAI's form."""

ToolList = Sequence[Mapping[str, Any]] | None
"""The same, read only."""

_ROLES = ("system", "developer", "user", "assistant", "tool")
_FIRST = ("system", "developer")
_REASONING = ("reasoning_content", "thinking", "reasoning")


def is_messages(value: object) -> TypeGuard[Messages]:
    """Whether a field holds messages rather than text."""
    return isinstance(value, list)


def check_messages(
    value: object,
    *,
    field: str,
    ends: Literal["assistant", "question"],
    tools: ToolList = None,
) -> Messages:
    """The messages of a whole conversation, checked.

    Args:
      value: what the field holds.
      field: its name, for the error.
      ends: whether the last message must be the assistant's (an example to learn from) or must
        not (a prompt).
      tools: what the assistant may call.

    Raises:
      DataError: naming the message, counted from 1, what is wrong and what to change.
    """
    if not isinstance(value, list) or not value:
        raise DataError(
            f"{field} is {_kind(value)}; it must be a list of messages such as "
            '{"role": "user", "content": "…"}'
        )
    for number, message in enumerate(value, 1):
        _check_message(message, f"{field}: message {number}", tools)
    _check_order(value, field)
    last = value[-1]["role"]
    if ends == "assistant" and last != "assistant":
        raise DataError(
            f"{field} ends with the role {last}, so nothing is learned from it; end with an "
            "assistant message or remove the last one"
        )
    if ends == "question" and last == "assistant":
        raise DataError(
            f"{field} ends with the role assistant, but the model is to answer it; remove the last "
            "message"
        )
    return value


def _kind(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, list | dict | str) and not value:
        return f"an empty {type(value).__name__}"
    return f"a {type(value).__name__}"


def _check_message(message: object, name: str, tools: ToolList) -> None:
    if not isinstance(message, dict) or "role" not in message:
        hint = ""
        if isinstance(message, dict) and "from" in message and "value" in message:
            hint = "; rename from to role (human: user, gpt: assistant) and value to content"
        raise DataError(f"{name} is {_kind(message)} without a role; give role and content{hint}")
    role = message["role"]
    if role not in _ROLES:
        raise DataError(f"{name} has the role {role!r}; use one of {', '.join(_ROLES)}")
    name = f"{name} ({role})"
    text = _text(message.get("content"), name)
    if role == "assistant":
        _check_assistant(message, text, name, tools)
    elif message.get("tool_calls"):
        raise DataError(f"{name} has tool_calls; only an assistant calls tools")
    elif "content" not in message or message["content"] is None:
        raise DataError(f"{name} has no content; give it text")
    elif role == "user" and not text.strip():
        raise DataError(f"{name} has empty content; write the text or remove the example")


def _text(content: object, name: str) -> str:
    """The text of a message's content."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise DataError(f"{name} has content that is {_kind(content)}; give text or parts of text")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise DataError(
                f"{name} has a part of type {kind}; the model reads text: give "
                '{"type": "text", "text": "…"}'
            )
        texts.append(part["text"])
    return "".join(texts)


def _check_assistant(message: JsonObject, text: str, name: str, tools: ToolList) -> None:
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise DataError(f"{name} has tool_calls that are {_kind(calls)}; give a list")
    for call in calls:
        _check_call(call, name, tools)
    weight = message.get("weight", 1)
    if weight not in (0, 1):
        raise DataError(f"{name} has weight {weight!r}; use 1 to train on it, 0 not to")
    thought = any(message.get(key) for key in _REASONING)
    if not text.strip() and not calls and not thought:
        raise DataError(
            f"{name} is an empty completion: it has neither text nor tool calls; write the answer "
            "or remove the example"
        )


def _check_call(call: object, name: str, tools: ToolList) -> None:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise DataError(
            f"{name} has a tool call without a function's name; write "
            '{"type": "function", "function": {"name": "…", "arguments": "{…}"}}'
        )
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except ValueError as error:
            raise DataError(
                f"{name} calls {function['name']} with arguments that are not JSON ({error}); fix "
                "them"
            ) from error
    if not isinstance(arguments, dict):
        raise DataError(
            f"{name} calls {function['name']} with arguments that are {_kind(arguments)}; give an "
            "object"
        )
    offered = [tool["function"]["name"] for tool in tools or ()]
    if offered and function["name"] not in offered:
        raise DataError(
            f"{name} calls {function['name']}, which is none of the tools {', '.join(offered)}; "
            "add it to tools or fix the name"
        )


def _check_order(messages: Messages, field: str) -> None:
    """User and assistant alternate; tools answer calls; instructions come first."""
    before = "start"
    pending: list[str | None] = []
    for number, message in enumerate(messages, 1):
        role = message["role"]
        name = f"{field}: message {number}"
        if role == "tool":
            _answer(message, pending, name)
        elif pending:
            raise DataError(
                f"{name} has the role {role}, but a tool call of the assistant before it has no "
                "answer; add a message of the role tool for each call"
            )
        allowed = _followers(before)
        if role not in allowed:
            place = "comes first" if before == "start" else f"follows the role {before}"
            raise DataError(
                f"{name} has the role {role}, which {place} here; there may be "
                f"{' or '.join(allowed)}: join, reorder or remove messages"
            )
        if role == "assistant":
            pending = [call.get("id") for call in message.get("tool_calls") or []]
        before = role


def _followers(role: str) -> tuple[str, ...]:
    return {
        "start": ("system", "developer", "user"),
        "system": ("user",),
        "developer": ("user",),
        "user": ("assistant",),
        "assistant": ("user", "tool"),
        "tool": ("assistant", "tool"),
    }[role]


def _answer(message: JsonObject, pending: list[str | None], name: str) -> None:
    """Take the call that a tool message answers off the list of those pending."""
    if not pending:
        raise DataError(
            f"{name} has the role tool, but no tool call of the assistant is left to answer; add "
            "tool_calls to the assistant message before it, or remove it"
        )
    asked = message.get("tool_call_id")
    if asked is None or None in pending:
        pending.pop(0)
    elif asked in pending:
        pending.remove(asked)
    else:
        raise DataError(
            f"{name} answers the call {asked!r}, but the assistant made {pending}; fix tool_call_id"
        )


def check_tools(value: object) -> Tools:
    """The tools of a record: a list of function definitions, or the JSON text of one.

    Raises:
      DataError: for anything else.
    """
    if value is None:
        return None
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else []
        except ValueError as error:
            raise DataError(f"tools is text that is not JSON ({error}); fix it") from error
    if not isinstance(value, list):
        raise DataError(f"tools is {_kind(value)}; give a list of function definitions")
    for number, tool in enumerate(value, 1):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise DataError(
                f"tools: number {number} is not a function definition; write "
                '{"type": "function", "function": {"name": "…", "parameters": {…}}}'
            )
    return value or None


@dataclass(frozen=True, kw_only=True)
class _Templated:
    """What a record tells the chat template beside its messages."""

    tools: Tools = None
    variables: JsonObject = field(default_factory=dict)
    """`chat_template_kwargs` of the record: further variables of the template."""


@dataclass(frozen=True, kw_only=True)
class Chat(_Templated):
    """A conversation to learn every assistant turn of."""

    messages: Messages


@dataclass(frozen=True, kw_only=True)
class Completion(_Templated):
    """A prompt, and the completion to learn; both text or both messages."""

    prompt: str | Messages
    completion: str | Messages


@dataclass(frozen=True, kw_only=True)
class Text:
    """A plain text, all of which is learned."""

    text: str


Example = Chat | Completion | Text
"""What supervised fine-tuning learns from."""


@dataclass(frozen=True, kw_only=True)
class Pair(_Templated):
    """Two completions of one prompt, the first preferred; all text or all messages."""

    prompt: str | Messages
    chosen: str | Messages
    rejected: str | Messages
    margin: float | None = None
    """By how much `chosen` is better, for reward models with margins."""


@dataclass(frozen=True, kw_only=True)
class Labelled(Completion):
    """A completion that is desirable or not."""

    label: bool


@dataclass(frozen=True, kw_only=True)
class Prompt(_Templated):
    """A prompt that the model is to answer, and the line's other columns for reward functions."""

    where: str
    """`FILE:LINE`."""
    prompt: str | Messages
    record: JsonObject = field(default_factory=dict)
    """Every other column of the line, such as `answer`."""
