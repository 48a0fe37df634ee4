"""The fields of one line: present or not, text or messages, a prompt and what follows it."""

import itertools
from typing import Any

from fornax.config.errors import DataError
from fornax.tune.data.lines import Line
from fornax.tune.data.messages import check_messages, check_tools, is_messages
from fornax.tune.data.records import Tools

__all__ = ["Fields", "common_prefix", "parts_of"]


class Fields:
    """A line's fields; every method raises `DataError` for one that is missing or wrong."""

    def __init__(self, line: Line):
        self._where = line.where
        self._fields = line.fields

    def has(self, name: str) -> bool:
        """Whether the line has a field that is not null."""
        return self._fields.get(name) is not None

    def missing(self, wanted: str) -> DataError:
        """The error for a line without what it needs."""
        found = ", ".join(sorted(self._fields)) or "nothing"
        return DataError(f"has {found}, and needs {wanted}; add or rename columns")

    def get(self, name: str) -> Any:
        """A field that must be there."""
        if not self.has(name):
            raise self.missing(name)
        return self._fields[name]

    def text(self, name: str) -> str:
        """A field of text that must not be empty."""
        value = self.get(name)
        if not isinstance(value, str):
            raise DataError(f"{name} is a {type(value).__name__}; it must be text")
        if not value.strip():
            raise DataError(f"{name} is empty; write the text or remove the line")
        return value

    def tools(self) -> Tools:
        """The line's `tools`, a list or JSON text."""
        return check_tools(self._fields.get("tools"))

    def variables(self) -> dict[str, Any]:
        """The line's `chat_template_kwargs`."""
        value = self._fields.get("chat_template_kwargs") or {}
        if not isinstance(value, dict):
            raise DataError(
                f"chat_template_kwargs is a {type(value).__name__}; it must be an object"
            )
        return value

    def common(self) -> dict[str, Any]:
        """What every kind of record has."""
        return {"where": self._where, "tools": self.tools(), "variables": self.variables()}

    def pair_of(self, prompt: str, answer: str) -> tuple[Any, Any]:
        """A prompt and what follows it, both text or both messages.

        An answer in messages may repeat the prompt's messages, and a prompt in text before messages
        is a user's; an answer in text after messages is an assistant's.
        """
        asked, answered = self.get(prompt), self.get(answer)
        if not is_messages(asked) and not is_messages(answered):
            given = asked if asked == "" else self.text(prompt)  # an empty prompt: from nothing
            try:
                return given, self.text(answer)
            except DataError as error:
                if isinstance(answered, str):
                    raise _empty(answer) from error
                raise
        if not is_messages(asked):
            asked = [{"role": "user", "content": self.text(prompt)}]
        if not is_messages(answered):
            answered = [{"role": "assistant", "content": answered}]
        if answered and isinstance(answered[0], dict) and answered[0].get("role") != "assistant":
            whole = answered
        else:
            whole = [*asked, *answered]
        return asked, parts_of(asked, whole, answer, self.tools())


def _empty(name: str) -> DataError:
    return DataError(f"{name} is an empty completion; write the answer or remove the line")


def parts_of(prompt: Any, whole: Any, name: str, tools: Tools) -> Any:
    """What follows `prompt` in `whole`, both text or both messages, checked."""
    rest = whole[len(prompt) :]
    if not is_messages(whole):
        if not rest.strip():
            raise _empty(name)
        return rest
    if whole[: len(prompt)] != prompt:
        raise DataError(
            f"{name} is a conversation that does not begin with the prompt; begin it with the same "
            "messages, or give only the answer"
        )
    check_messages(whole, field=f"prompt and {name}", ends="assistant", tools=tools)
    if not prompt or not rest or rest[0]["role"] != "assistant":
        raise DataError(
            f"{name} must go on with an assistant message after the prompt; give the prompt up to "
            "the question"
        )
    return rest


def common_prefix(one: Any, other: Any) -> Any:
    """The beginning that two conversations share, in whole messages; of two texts, in words."""
    pairs = zip(one, other, strict=False)
    length = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    if is_messages(one):
        return one[:length]
    while length and not one[length - 1].isspace():
        length -= 1
    return one[:length].rstrip(" ")
