"""What happens to records between a source and packing: tokenize, filter, your own function or
class.

A transform is built once per stream and works on batches of records; None in place of a record
means that it was dropped, and stays None to the end of the chain.
"""

import functools
import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from fornax.config import ConfigError, DataError, FornaxError, load_object
from fornax.data.records import Record, as_record
from fornax.data.tokenizer import load_tokenizer

Scalar = bool | int | float | str


class Apply(Protocol):
    """A built transform: records and one random seed each, to records or None."""

    def __call__(
        self, records: Sequence[Record], seeds: Sequence[tuple[int, ...]]
    ) -> list[Record | None]: ...


def text_of(record: Record, name: str) -> str:
    """The text field of a record; `DataError` naming the fields it has otherwise."""
    value = record.get(name)
    if isinstance(value, str):
        return value
    if name not in record:
        raise DataError(
            f"there is no field {name!r}; the record has {', '.join(sorted(record))}: name the one "
            "with the text (text_field of a build, field of a transform), or rename it"
        )
    raise DataError(f"field {name!r} is {type(value).__name__}, it must be text")


@dataclass(frozen=True, kw_only=True)
class Tokenize:
    """Text to token ids, in the field `tokens`."""

    type: Literal["tokenize"] = "tokenize"
    tokenizer: Path
    """A tokenizer.json, or the folder that holds it."""
    field: str = "text"
    """The field that holds the text."""
    append_eos: bool = True
    """End every document with the end-of-text token."""
    prepend_bos: bool = False
    """Begin every document with the begin token."""

    def build(self) -> Apply:
        """Load the tokenizer."""
        tokenizer = load_tokenizer(self.tokenizer)

        def apply(
            records: Sequence[Record], seeds: Sequence[tuple[int, ...]]
        ) -> list[Record | None]:
            del seeds
            texts = [text_of(record, self.field) for record in records]
            ids = tokenizer.encode_batch(texts, bos=self.prepend_bos, eos=self.append_eos)
            return [{**r, "tokens": t} for r, t in zip(records, ids, strict=True)]

        return apply


@dataclass(frozen=True, kw_only=True)
class FilterLength:
    """Keep records whose text (characters) or tokens (count) lie in a range."""

    type: Literal["filter_length"] = "filter_length"
    field: str = "text"
    """The field to measure: a text or an array of tokens."""
    minimum: int = 1
    """Shorter records are dropped."""
    maximum: int | None = None
    """Longer records are dropped; none: no limit."""

    def __post_init__(self) -> None:
        if self.maximum is not None and self.maximum < self.minimum:
            raise ConfigError(
                f"filter_length: maximum={self.maximum} is below minimum={self.minimum}"
            )

    def build(self) -> Apply:
        """A filter over single records."""

        def keep(record: Record) -> bool:
            if self.field not in record:
                text_of(record, self.field)
            size = len(record[self.field])
            return self.minimum <= size and (self.maximum is None or size <= self.maximum)

        return _each(lambda record, _: record if keep(record) else None)


@dataclass(frozen=True, kw_only=True)
class FilterRegex:
    """Keep records whose text contains a match, or drop those."""

    type: Literal["filter_regex"] = "filter_regex"
    pattern: str
    """A regular expression of Python's `re`, searched anywhere in the text."""
    field: str = "text"
    """The field that holds the text."""
    drop: bool = False
    """Drop the records that match instead of keeping them."""

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise ConfigError(f"filter_regex: pattern {self.pattern!r}: {error}") from error

    def build(self) -> Apply:
        """A filter over single records."""
        pattern = re.compile(self.pattern)

        def apply(record: Record, seed: tuple[int, ...]) -> Record | None:
            del seed
            found = pattern.search(text_of(record, self.field)) is not None
            return record if found != self.drop else None

        return _each(apply)


@dataclass(frozen=True, kw_only=True)
class Python:
    """A function or class of yours, or a Grain transform, by import path.

    A function takes a record and returns a record, None to drop it, or a bool (keep or drop). A
    class is built with `arguments` and then called the same way; a Grain `Map`, `RandomMap` or
    `Filter` is used through its own method. A parameter named `rng` receives a
    `numpy.random.Generator` seeded by the record, so that random transforms repeat exactly.
    """

    type: Literal["python"] = "python"
    target: str
    """`package.module:NAME`."""
    arguments: dict[str, Scalar] = field(default_factory=dict)
    """Keyword arguments of the class, or bound to the function."""

    def build(self) -> Apply:
        """Import the target; `ConfigError` when there is none."""
        return _each(_as_function(load_object(self.target), self.arguments, self.target))


Transform = Tokenize | FilterLength | FilterRegex | Python


_Function = Callable[[Record, tuple[int, ...]], Any]
"""A record and the seed of its own random generator, to what the user's function returned."""


def _as_function(target: object, arguments: dict[str, Scalar], name: str) -> _Function:
    if isinstance(target, type):
        target = target(**arguments)
        arguments = {}
    random = not callable(target) and hasattr(target, "random_map")
    if not callable(target):
        for method in ("random_map", "map", "filter"):
            if hasattr(target, method):
                target = getattr(target, method)
                break
    if not callable(target):
        raise ConfigError(f"target {name!r} is {type(target).__name__}: name a function or a class")
    bound = functools.partial(target, **arguments)
    if random:
        return lambda record, seed: bound(record, np.random.default_rng(seed))
    if "rng" in inspect.signature(target).parameters:
        return lambda record, seed: bound(record, rng=np.random.default_rng(seed))
    return lambda record, seed: bound(record)


def _each(function: _Function) -> Apply:
    def apply(records: Sequence[Record], seeds: Sequence[tuple[int, ...]]) -> list[Record | None]:
        pairs = zip(records, seeds, strict=True)
        return [_outcome(record, function(record, seed)) for record, seed in pairs]

    return apply


def _outcome(record: Record, value: object) -> Record | None:
    if value is None or value is False or value is np.False_:
        return None
    if value is True or value is np.True_:
        return record
    return as_record(value)


class Chain:
    """Transforms in order; a failure names the record and the transform and keeps its cause."""

    def __init__(self, transforms: Sequence[Transform]):
        self.names = [transform_name(t) for t in transforms]
        self._apply = [t.build() for t in transforms]
        self._of_users = [isinstance(t, Python) for t in transforms]

    def __len__(self) -> int:
        return len(self._apply)

    def stage(
        self,
        number: int,
        records: Sequence[Record | None],
        seeds: Sequence[tuple[int, ...]],
        where: Callable[[int], str],
        note: Callable[[int], None] | None = None,
    ) -> list[Record | None]:
        """Apply transform `number`.

        Args:
          number: which of the chain's.
          records: the records; None where one was dropped.
          seeds: of each.
          where: tells where the record in a slot comes from.
          note: told the slot of each record before a function of the user's gets it.
        """
        slots = [i for i, record in enumerate(records) if record is not None]
        kept = [record for record in records if record is not None]
        apply = self._apply[number]
        try:
            if note is None or not self._of_users[number]:
                results = apply(kept, [(*seeds[i], number) for i in slots])
            else:
                results = []
                for slot, record in zip(slots, kept, strict=True):
                    note(slot)
                    results += apply([record], [(*seeds[slot], number)])
        except Exception as error:
            slot, cause = self._culprit(apply, kept, [(*seeds[i], number) for i in slots], error)
            raise _failure(self.names[number], where(slots[slot]), cause) from cause
        out: list[Record | None] = [None] * len(records)
        for slot, result in zip(slots, results, strict=True):
            out[slot] = result
        return out

    def _culprit(
        self,
        apply: Apply,
        records: Sequence[Record],
        seeds: Sequence[tuple[int, ...]],
        error: Exception,
    ) -> tuple[int, Exception]:
        """The first record that fails alone, with its exception."""
        for slot, (record, seed) in enumerate(zip(records, seeds, strict=True)):
            try:
                apply([record], [seed])
            except Exception as alone:
                return slot, alone
        return 0, error


def _failure(name: str, where: str, cause: Exception) -> DataError:
    detail = str(cause) if isinstance(cause, FornaxError) else f"{type(cause).__name__}: {cause}"
    return DataError(f"transform {name} failed on {where}: {detail}")


def transform_name(transform: Transform) -> str:
    """A transform's name in errors and pictures."""
    return transform.target if isinstance(transform, Python) else transform.type
