"""Files of records, read to the end: JSON Lines, JSON, Parquet, and `save_to_disk` folders."""

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fornax.config.errors import DataError, FornaxError
from fornax.data import HuggingFace
from fornax.data.files import Storage, is_remote
from fornax.data.records import Source, decode
from fornax.data.sources.jsonl import JsonlSource
from fornax.data.sources.parquet import ParquetSource
from fornax.tune.data.records import JsonObject

__all__ = ["Line", "Paths", "Problems", "read_lines"]


_REPORTED = 5


class Problems:
    """What is wrong with records, each with its file and line.

    Example:
      >>> problems = Problems()
      >>> problems.add("chats.jsonl:3", "there is no messages; name the conversation so")
      >>> problems.check()
      Traceback (most recent call last):
      fornax.config.errors.DataError: chats.jsonl:3: there is no messages; name the conversation so
    """

    def __init__(self) -> None:
        self.count = 0
        self._first: list[str] = []

    def add(self, where: str, message: str) -> None:
        """Note a problem of the record at `where`, `FILE:LINE`."""
        self.count += 1
        if len(self._first) < _REPORTED:
            self._first.append(f"{where}: {message}")

    @contextmanager
    def of(self, where: str) -> Iterator[None]:
        """Note what the body finds wrong with a record, and continue."""
        try:
            yield
        except FornaxError as error:
            self.add(where, str(error))

    def check(self) -> None:
        """Raise `DataError` with the first problems, and how many more there are."""
        if not self.count:
            return
        lines = list(self._first)
        if self.count > len(lines):
            lines.append(f"and {self.count - len(lines)} more records with problems")
        raise DataError(".\n".join(lines))


Paths = str | Path | Sequence[str | Path]
"""A file, a folder, a glob, or several of them."""

_LINES = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")
_ARRAYS = (".json", ".json.gz")
_TABLES = (".parquet",)
_KNOWN = (*_LINES, *_ARRAYS, *_TABLES)
# Of JSON, a dataset's repository has its description.
_ON_HUB = tuple(f"*{ending}" for ending in (*_LINES, *_TABLES))


@dataclass(frozen=True)
class Line:
    """A record and where it lies."""

    where: str
    """`FILE:LINE` of JSON Lines and JSON, `FILE:row N` (from 1) of tables."""
    fields: JsonObject


def read_lines(
    paths: Paths,
    problems: Problems,
    *,
    columns: Mapping[str, str] | None = None,
) -> Iterator[Line]:
    """The records of all files; what is not a JSON object becomes a problem.

    Args:
      paths: files, folders, globs, or datasets on the Hub; gs:// and s3:// too.
      problems: takes up records that cannot be read.
      columns: our name of a field to the name that the files use.

    Raises:
      DataError: a path without a file, a file of an unknown kind or damaged as a whole, no
        records at all, or a name in `columns` that none of them has.
    """
    storage = Storage()
    last: Line | None = None
    absent = set((columns or {}).values())
    for file in _files(paths, storage):
        for line in _read(file, storage, problems):
            last = line
            absent.difference_update(line.fields)
            yield Line(line.where, _renamed(line.fields, columns)) if columns else line
    if last is None and not problems.count:
        raise DataError(f"{_shown(paths)} has no records; write at least one line")
    if last is not None and absent:
        raise DataError(
            f"columns names {', '.join(sorted(absent))}, which no record of {_shown(paths)} has; "
            f"they have {', '.join(last.fields)}"
        )


def _shown(paths: Paths) -> str:
    return str(paths) if isinstance(paths, str | Path) else ", ".join(map(str, paths))


def _files(paths: Paths, storage: Storage) -> list[str]:
    found: list[str] = []
    for path in (paths,) if isinstance(paths, str | Path) else paths:
        if _is_saved_dataset(path):
            found.append(str(path))
            continue
        files = storage.expand(path, _ON_HUB)
        if Path(path).is_dir():
            files = [file for file in files if file.endswith(_KNOWN)]
            if not files:
                raise DataError(f"{path} holds no {', '.join(_KNOWN)} file; name a file")
        found.extend(files)
    return found


def _is_saved_dataset(path: str | Path) -> bool:
    return not is_remote(path) and (Path(path) / "state.json").is_file()


def _read(file: str, storage: Storage, problems: Problems) -> Iterator[Line]:
    if _is_saved_dataset(file):
        return _rows(file, HuggingFace(path=file, columns=()).open(storage))
    if file.endswith(_LINES):
        return _lines(JsonlSource([file], storage), problems)
    if file.endswith(_ARRAYS):
        return _array(file, storage, problems)
    if file.endswith(_TABLES):
        return _rows(file, ParquetSource([file], (), storage))
    raise DataError(
        f"{file} is of no known kind; name it after one of {', '.join(_KNOWN)}, or name a folder "
        "made by save_to_disk"
    )


def _lines(source: JsonlSource, problems: Problems) -> Iterator[Line]:
    for index in range(len(source)):
        place = source.locate(index)
        where = ":".join(place.rsplit(" line ", 1))
        try:
            yield Line(where, source[index])
        except DataError as error:
            problems.add(where, str(error).removeprefix(place).strip())


def _rows(file: str, source: Source) -> Iterator[Line]:
    for index in range(len(source)):
        yield Line(f"{file}:row {index + 1}", _without_nulls(source[index]))


def _without_nulls(value: Any) -> Any:
    """A row without the fields that a table gives every row; a message keeps its `content`."""
    if isinstance(value, dict):
        return {
            key: _without_nulls(item)
            for key, item in value.items()
            if item is not None or (key == "content" and "role" in value)
        }
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _array(file: str, storage: Storage, problems: Problems) -> Iterator[Line]:
    """The objects of one JSON array, each with its line."""
    data = storage.local(file).read_bytes()
    text = decode(gzip.decompress(data) if file.endswith(".gz") else data, file)
    decoder, place, line, counted = json.JSONDecoder(), _skip(text, 0), 1, 0
    if text[place : place + 1] != "[":
        raise DataError(f"{file} is not a JSON array of objects; name JSON Lines files .jsonl")
    place = _skip(text, place + 1)
    while text[place : place + 1] != "]":
        line, counted = line + text.count("\n", counted, place), place
        where = f"{file}:{line}"
        try:
            value, place = decoder.raw_decode(text, place)
        except ValueError as error:
            problems.add(where, f"is not valid JSON ({error}): fix it")
            return
        if isinstance(value, dict):
            yield Line(where, value)
        else:
            problems.add(where, f"is {type(value).__name__}, it must be a JSON object")
        place = _skip(text, place)
        if text[place : place + 1] == ",":
            place = _skip(text, place + 1)
        elif text[place : place + 1] != "]":
            problems.add(where, "is followed by neither a comma nor the array's end: fix it")
            return


def _skip(text: str, place: int) -> int:
    while text[place : place + 1].isspace():
        place += 1
    return place


def _renamed(fields: JsonObject, columns: Mapping[str, str]) -> JsonObject:
    missing = [theirs for theirs in columns.values() if theirs not in fields]
    taken = set(columns.values())
    renamed = {key: value for key, value in fields.items() if key not in taken}
    given = {ours: fields[theirs] for ours, theirs in columns.items() if theirs not in missing}
    return renamed | given
