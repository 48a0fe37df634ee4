"""Files to token sequences that fit the window: everything is read, checked and encoded first."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np

from fornax.config.errors import DataError
from fornax.tune.data.codec import Codec
from fornax.tune.data.encoded import (
    Encoded,
    Limit,
    Summary,
    encoded,
    fit_answers,
    fit_example,
    fit_prompt,
)
from fornax.tune.data.lines import Line, Paths, Problems, read_lines
from fornax.tune.data.read import (
    Columns,
    parse_example,
    parse_labelled,
    parse_pair,
    parse_prompt,
)
from fornax.tune.data.records import (
    Chat,
    Example,
    JsonObject,
    Labelled,
    Messages,
    Pair,
    Prompt,
    Text,
    Tools,
)

__all__ = [
    "LabelledTokens",
    "Loaded",
    "PairTokens",
    "PromptTokens",
    "load_examples",
    "load_labelled",
    "load_pairs",
    "load_prompts",
]

_Item = TypeVar("_Item")
_Record = TypeVar("_Record")


@dataclass(frozen=True, kw_only=True)
class Loaded(Generic[_Item]):
    """A data set in memory."""

    items: list[_Item]
    summary: Summary
    records: list[int] = field(default_factory=list)
    """The record, counted from 0 over all lines, that each item comes from: what must stay together
    when some are held back."""

    def __len__(self) -> int:
        return len(self.items)


@dataclass(frozen=True, kw_only=True)
class PairTokens:
    """A preference pair; both sequences begin with the same prompt."""

    chosen: Encoded
    rejected: Encoded
    margin: float | None = None


@dataclass(frozen=True, kw_only=True)
class LabelledTokens:
    """A completion and whether it is desirable."""

    sequence: Encoded
    label: bool


@dataclass(frozen=True, kw_only=True)
class PromptTokens:
    """A prompt to be answered."""

    tokens: np.ndarray
    """int32 `[n]`."""
    prompt: str | Messages
    tools: Tools
    record: JsonObject = field(default_factory=dict)
    """The line's other columns."""
    where: str = ""


def load_examples(
    paths: Paths, codec: Codec, limit: Limit, *, full: bool = False, columns: Columns | None = None
) -> Loaded[Encoded]:
    """Examples for supervised fine-tuning.

    Args:
      paths: files, folders or globs.
      codec: encodes them.
      limit: the window.
      full: learn prompts and every other message too, not only what the assistant wrote.
      columns: our names of fields to the files'.

    Raises:
      DataError: with file and line of the first records that cannot be used.
    """

    def make(record: Example, summary: Summary) -> Iterator[Encoded]:
        found = _encode(record, codec)
        summary.split += len(found) - 1
        for sequence in found:
            whole = np.ones(sequence.length, bool)
            sequence = encoded(sequence.tokens, whole) if full else sequence
            kept = fit_example(sequence, limit, summary)
            if kept is not None:
                summary.add(kept)
                yield kept

    return _load(paths, parse_example, make, columns)


def _encode(record: Example, codec: Codec) -> list[Encoded]:
    if isinstance(record, Chat):
        return codec.chat(record)
    if isinstance(record, Text):
        return [codec.text(record.text)]
    return [codec.completion(record.prompt, record.completion, record.tools, record.variables)]


def load_pairs(
    paths: Paths, codec: Codec, limit: Limit, *, columns: Columns | None = None
) -> Loaded[PairTokens]:
    """Preference pairs. `truncate` cuts the prompt's beginning, of both alike.

    Raises:
      DataError: with file and line of the first records that cannot be used.
    """

    def make(record: Pair, summary: Summary) -> Iterator[PairTokens]:
        sequences = [
            codec.completion(record.prompt, answer, record.tools, record.variables)
            for answer in (record.chosen, record.rejected)
        ]
        kept = fit_answers(sequences, limit, summary, keep=_kept(codec, sequences[0]))
        if kept is not None:
            summary.add(*kept)
            yield PairTokens(chosen=kept[0], rejected=kept[1], margin=record.margin)

    return _load(paths, parse_pair, make, columns)


def load_labelled(
    paths: Paths, codec: Codec, limit: Limit, *, columns: Columns | None = None
) -> Loaded[LabelledTokens]:
    """Labelled completions. `truncate` cuts the prompt's beginning.

    Raises:
      DataError: with file and line of the first records that cannot be used.
    """

    def make(record: Labelled, summary: Summary) -> Iterator[LabelledTokens]:
        answer = codec.completion(record.prompt, record.completion, record.tools, record.variables)
        kept = fit_answers([answer], limit, summary, keep=_kept(codec, answer))
        if kept is not None:
            summary.add(*kept)
            yield LabelledTokens(sequence=kept[0], label=record.label)

    return _load(paths, parse_labelled, make, columns)


def load_prompts(
    paths: Paths, codec: Codec, limit: Limit, *, columns: Columns | None = None
) -> Loaded[PromptTokens]:
    """Prompts, in a window of prompts alone. `truncate` cuts the beginning.

    Raises:
      DataError: with file and line of the first records that cannot be used.
    """

    def make(record: Prompt, summary: Summary) -> Iterator[PromptTokens]:
        tokens = codec.prompt(record.prompt, record.tools, record.variables)
        prompt = encoded(tokens, np.zeros(len(tokens), bool))
        kept = fit_prompt(prompt, limit, summary, keep=_kept(codec, prompt))
        if kept is not None:
            summary.add(kept)
            yield PromptTokens(
                tokens=kept.tokens,
                prompt=record.prompt,
                tools=record.tools,
                record=record.record,
                where=record.where,
            )

    return _load(paths, parse_prompt, make, columns)


def _kept(codec: Codec, sequence: Encoded) -> int:
    """Tokens at the beginning that a cut prompt keeps: the one that begins every text."""
    begins = sequence.length > 0 and int(sequence.tokens[0]) == codec.bos_id
    return int(begins)


def _load(
    paths: Paths,
    parse: Callable[[Line], list[_Record]],
    make: Callable[[_Record, Summary], Iterator[_Item]],
    columns: Columns | None,
) -> Loaded[_Item]:
    problems = Problems()
    listed = [paths] if isinstance(paths, str | Path) else paths
    summary = Summary(name=", ".join(map(str, listed)))
    items: list[_Item] = []
    records: list[int] = []
    for line in read_lines(paths, problems, columns=columns):
        summary.records += 1
        with problems.of(line.where):
            for record in parse(line):
                items.extend(make(record, summary))
        records.extend([summary.records - 1] * (len(items) - len(records)))
    problems.check()
    if not items:
        raise DataError(f"{summary.text()}: nothing is left; raise max_length")
    return Loaded(items=items, summary=summary, records=records)
