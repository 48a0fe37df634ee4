"""Lines to records: what each line may hold, and errors that name file and line."""

import itertools
from collections.abc import Mapping
from typing import Any

from fornax.config.errors import DataError
from fornax.tune.data.lines import Line
from fornax.tune.data.records import (
    Chat,
    Completion,
    Example,
    JsonObject,
    Labelled,
    Pair,
    Prompt,
    Text,
    Tools,
    check_messages,
    check_tools,
    is_messages,
)

__all__ = [
    "Columns",
    "parse_example",
    "parse_labelled",
    "parse_pair",
    "parse_prompt",
]


class Fields:
    """A line's fields; every method raises `DataError` for one that is missing or wrong."""

    def __init__(self, line: Line):
        self._fields = line.fields

    def has(self, name: str) -> bool:
        """Whether the line has a field that is not null."""
        return self._fields.get(name) is not None

    def missing(self, wanted: str) -> DataError:
        """The error for a line without what it needs."""
        found = ", ".join(sorted(self._fields)) or "nothing"
        return DataError(f"has {found}, and needs {wanted}; add or rename columns")

    def get(self, name: str) -> object:
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

    def variables(self) -> JsonObject:
        """The line's `chat_template_kwargs`."""
        value = self._fields.get("chat_template_kwargs") or {}
        if not isinstance(value, dict):
            raise DataError(
                f"chat_template_kwargs is a {type(value).__name__}; it must be an object"
            )
        return value

    def common(self) -> JsonObject:
        """What a record tells the chat template."""
        return {"tools": self.tools(), "variables": self.variables()}

    def prompt_and_answer(self, prompt: str, answer: str) -> tuple[Any, Any]:
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
        return asked, continuation_of(asked, whole, answer, self.tools())


def _empty(name: str) -> DataError:
    return DataError(f"{name} is an empty completion; write the answer or remove the line")


def continuation_of(prompt: Any, whole: Any, name: str, tools: Tools) -> Any:
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
            f"{name} must continue with an assistant message after the prompt; give the prompt up "
            "to the question"
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


Columns = Mapping[str, str]
"""Our name of a field to the name that the files use: `{"prompt": "question"}`."""


def parse_example(line: Line) -> list[Example]:
    """One example for supervised fine-tuning."""
    fields = Fields(line)
    if fields.has("messages"):
        given = line.fields["messages"]
        check_messages(given, field="messages", ends="assistant", tools=fields.tools())
        return [Chat(messages=given, **fields.common())]
    if fields.has("prompt") or fields.has("completion"):
        prompt, completion = fields.prompt_and_answer("prompt", "completion")
        return [Completion(prompt=prompt, completion=completion, **fields.common())]
    if fields.has("text"):
        return [Text(text=fields.text("text"))]
    raise fields.missing("messages, prompt and completion, or text")


def parse_pair(line: Line) -> list[Pair]:
    """One preference pair."""
    fields = Fields(line)
    for name, other in (("chosen", "rejected"), ("rejected", "chosen")):
        if not fields.has(name):
            if fields.has(other):
                raise DataError(
                    f"has {other} and no {name}: the preference is unpaired; add {name}, or use "
                    "labels and kto"
                )
            raise fields.missing("chosen and rejected, with prompt")
    if line.fields["chosen"] == line.fields["rejected"]:
        raise DataError("chosen and rejected are the same: nothing is preferred; remove the line")
    prompt, chosen, rejected = _prompt_and_answers(fields)
    margin = line.fields.get("margin")
    if margin is not None and (isinstance(margin, bool) or not isinstance(margin, int | float)):
        raise DataError(f"margin is {margin!r}; give a number")
    return [
        Pair(
            prompt=prompt,
            chosen=chosen,
            rejected=rejected,
            margin=None if margin is None else float(margin),
            **fields.common(),
        )
    ]


def _prompt_and_answers(fields: Fields) -> tuple[Any, Any, Any]:
    if fields.has("prompt"):
        prompt, chosen = fields.prompt_and_answer("prompt", "chosen")
        again, rejected = fields.prompt_and_answer("prompt", "rejected")
        if prompt != again:
            raise DataError(
                "chosen and rejected are of different kinds (text, messages, or whole "
                "conversations); write both alike"
            )
        return prompt, chosen, rejected
    chosen, rejected = fields.get("chosen"), fields.get("rejected")
    if is_messages(chosen) != is_messages(rejected):
        raise DataError("one of chosen and rejected is text and one is messages; write both alike")
    shared = common_prefix(chosen, rejected)
    if not shared:
        raise DataError(
            "chosen and rejected share no beginning that could be the prompt; add prompt"
        )
    parts = [
        continuation_of(shared, whole, name, fields.tools())
        for name, whole in (("chosen", chosen), ("rejected", rejected))
    ]
    return shared, *parts


def parse_labelled(line: Line) -> list[Labelled]:
    """One labelled completion, or the two of a preference pair."""
    fields = Fields(line)
    if fields.has("chosen") or fields.has("rejected"):
        pair = parse_pair(line)[0]
        return [
            Labelled(prompt=pair.prompt, completion=answer, label=label, **fields.common())
            for answer, label in ((pair.chosen, True), (pair.rejected, False))
        ]
    if not fields.has("completion"):
        raise fields.missing("prompt, completion and label")
    prompt, completion = fields.prompt_and_answer("prompt", "completion")
    label = line.fields.get("label")
    if label is None:
        raise fields.missing("label, true or false")
    if label not in (True, False):
        raise DataError(f"label is {label!r}; use true for a desirable completion, else false")
    return [Labelled(prompt=prompt, completion=completion, label=bool(label), **fields.common())]


def parse_prompt(line: Line) -> list[Prompt]:
    """One prompt."""
    fields = Fields(line)
    name = "prompt" if fields.has("prompt") else "messages"
    if not fields.has(name):
        raise fields.missing("prompt, or messages that end with a question")
    value = line.fields[name]
    if is_messages(value):
        value = check_messages(value, field=name, ends="question", tools=fields.tools())
    else:
        value = fields.text(name)
    used = {name, "tools", "chat_template_kwargs"}
    record = {key: item for key, item in line.fields.items() if key not in used}
    return [Prompt(where=line.where, prompt=value, record=record, **fields.common())]
