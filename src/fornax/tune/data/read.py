"""Files to records: what each line may hold, and errors that name file and line."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from fornax.config.errors import DataError
from fornax.tune.data.fields import Fields, common_prefix, parts_of
from fornax.tune.data.lines import Line, Paths, read_lines
from fornax.tune.data.messages import check_messages, is_messages
from fornax.tune.data.problems import Problems
from fornax.tune.data.records import Chat, Completion, Example, Labelled, Pair, Prompt, Text

__all__ = [
    "Columns",
    "parse_example",
    "parse_labelled",
    "parse_pair",
    "parse_prompt",
    "read_examples",
    "read_labelled",
    "read_pairs",
    "read_prompts",
]

_Record = TypeVar("_Record")

Columns = Mapping[str, str]
"""Our name of a field to the name that the files use: `{"prompt": "question"}`."""


def _read(
    paths: Paths, parse: Callable[[Line], list[_Record]], columns: Columns | None
) -> list[_Record]:
    problems = Problems()
    records: list[_Record] = []
    for line in read_lines(paths, problems, columns=columns):
        with problems.of(line.where):
            records.extend(parse(line))
    problems.check()
    return records


def read_examples(paths: Paths, *, columns: Columns | None = None) -> list[Example]:
    """Chats (`messages`), prompts with completions, and texts, line by line.

    Raises:
      DataError: with file and line of the first few records that are no such thing.
    """
    return _read(paths, parse_example, columns)


def read_pairs(paths: Paths, *, columns: Columns | None = None) -> list[Pair]:
    """Preference pairs: `chosen` and `rejected`, and `prompt` or a beginning that both share.

    Raises:
      DataError: with file and line of the first few records that are no such thing.
    """
    return _read(paths, parse_pair, columns)


def read_labelled(paths: Paths, *, columns: Columns | None = None) -> list[Labelled]:
    """Completions with a `label`; a preference pair counts as one of each.

    Raises:
      DataError: with file and line of the first few records that are no such thing.
    """
    return _read(paths, parse_labelled, columns)


def read_prompts(paths: Paths, *, columns: Columns | None = None) -> list[Prompt]:
    """Prompts (`prompt`, or `messages` that end with a question) and all other columns.

    Raises:
      DataError: with file and line of the first few records that are no such thing.
    """
    return _read(paths, parse_prompt, columns)


def parse_example(line: Line) -> list[Example]:
    """One example for supervised fine-tuning."""
    fields = Fields(line)
    if fields.has("messages"):
        tools = fields.tools()
        return [
            Chat(
                where=line.where,
                messages=check_messages(
                    line.fields["messages"], field="messages", ends="assistant", tools=tools
                ),
                tools=tools,
                variables=fields.variables(),
            )
        ]
    if fields.has("prompt") or fields.has("completion"):
        prompt, completion = fields.pair_of("prompt", "completion")
        return [Completion(prompt=prompt, completion=completion, **fields.common())]
    if fields.has("text"):
        return [Text(where=line.where, text=fields.text("text"))]
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
        prompt, chosen = fields.pair_of("prompt", "chosen")
        again, rejected = fields.pair_of("prompt", "rejected")
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
        parts_of(shared, whole, name, fields.tools())
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
    prompt, completion = fields.pair_of("prompt", "completion")
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
    return [Prompt(prompt=value, record=record, **fields.common())]
