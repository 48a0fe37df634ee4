"""Files of one JSON object per line as they grow: whole lines from a byte offset on.

A line that is half written waits for its end. A file that shrank, or is another one than before,
begins again. What is not a JSON object, and lines longer than any that we write, are counted and
passed over.
"""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from fornax.dashboard.folder import Folder

__all__ = ["HUGE", "Chunk", "Tail", "last_lines", "parse"]

HUGE = 4 << 20
"""Bytes of a line that is passed over."""
_PRINT = 64
"""Bytes before the offset by which a file is known again."""

Record = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """What was read at once."""

    text: bytes = b""
    """Whole lines."""
    begin: int = 0
    """The byte of the file that they begin at."""
    restarted: bool = False
    """Whether what was read before is not there any more; the text is of the beginning."""
    gone: bool = False
    """Whether there is no file."""
    more: bool = False
    """Whether there was more to read."""

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Each line and the byte of the file that it begins at."""
        place = self.begin
        for line in self.text.split(b"\n")[:-1]:
            yield place, line
            place += len(line) + 1


class Tail:
    """One file, read from where the last reading ended."""

    def __init__(self, folder: Folder, path: Path, offset: int = 0) -> None:
        """Read `path` from a byte that begins a line."""
        self._folder, self._path = folder, path
        self._identity: tuple[int, int] | None = None
        self._print: bytes | None = None
        self._in_huge = False
        self.offset = offset
        """Up to where it was read: the beginning of a line."""
        self.junk = 0
        """Lines that are not JSON objects."""
        self.huge = 0
        """Lines longer than 4 MB."""

    def records(self, chunk: Chunk) -> list[Record]:
        """The objects of what was read; what else is there is counted."""
        records, junk = parse(chunk.text)
        self.junk += junk
        return records

    def read(self, most: int = 1 << 20) -> Chunk:
        """The whole lines of the next `most` bytes; a line that is longer is read all the same."""
        try:
            descriptor = self._folder.open(self._path)
        except OSError:
            known = self._identity is not None or self.offset > 0
            self._begin_again()
            return Chunk(gone=True, restarted=known)
        try:
            return self._read(descriptor, most)
        except OSError:  # the disk, or the server that it is on: later again
            return Chunk()
        finally:
            os.close(descriptor)

    def state(self) -> dict[str, Any]:
        """Where it is, as JSON takes it."""
        return {
            "offset": self.offset,
            "junk": self.junk,
            "huge": self.huge,
            "identity": self._identity,
            "print": None if self._print is None else self._print.hex(),
            "in_huge": self._in_huge,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resume where another of the same file was."""
        self.offset, self.junk, self.huge = state["offset"], state["junk"], state["huge"]
        identity, before = state["identity"], state["print"]
        self._identity = None if identity is None else (identity[0], identity[1])
        self._print = None if before is None else bytes.fromhex(before)
        self._in_huge = state["in_huge"]

    def _read(self, descriptor: int, most: int) -> Chunk:
        restarted = not self._is_the_same(descriptor)
        if restarted:
            self._begin_again()
        found = os.fstat(descriptor)
        self._identity = (found.st_dev, found.st_ino)
        data = os.pread(descriptor, most, self.offset)
        end = data.rfind(b"\n")
        if end < 0 and len(data) == most and most < HUGE:
            data = os.pread(descriptor, HUGE, self.offset)
            end = data.rfind(b"\n")
        if end < 0:
            if len(data) < HUGE:  # half a line
                return Chunk(restarted=restarted)
            self.huge += not self._in_huge
            self._in_huge = True
            self._advance(descriptor, len(data))
            return Chunk(restarted=restarted, more=True)
        begin = 0
        if self._in_huge:  # up to the end of the line that is passed over
            self._in_huge, begin = False, data.index(b"\n") + 1
        chunk = Chunk(
            text=data[begin : end + 1],
            begin=self.offset + begin,
            restarted=restarted,
            more=len(data) >= most and found.st_size > self.offset + end + 1,
        )
        self._advance(descriptor, end + 1)
        return chunk

    def _advance(self, descriptor: int, count: int) -> None:
        self.offset += count
        before = max(0, self.offset - _PRINT)
        self._print = os.pread(descriptor, self.offset - before, before)

    def _begin_again(self) -> None:
        self.offset, self._identity, self._print, self._in_huge = 0, None, None, False
        self.junk = self.huge = 0

    def _is_the_same(self, descriptor: int) -> bool:
        """Whether what was read is still what precedes the offset."""
        if self.offset == 0:
            return True
        found = os.fstat(descriptor)
        if found.st_size < self.offset:
            return False
        if self._identity is not None and self._identity != (found.st_dev, found.st_ino):
            return False
        before = max(0, self.offset - _PRINT)
        here = os.pread(descriptor, self.offset - before, before)
        # An offset that a client names must at least be behind a line.
        return here.endswith(b"\n") if self._print is None else here == self._print


def parse(text: bytes) -> tuple[list[Record], int]:
    """The JSON objects of lines, and how many lines were none; empty lines do not count."""
    records: list[Record] = []
    junk = 0
    for line in text.split(b"\n"):
        if not line or line.isspace():
            continue
        try:
            record = orjson.loads(line)
        except orjson.JSONDecodeError:
            record = _lenient(line)
        if isinstance(record, dict):
            records.append(record)
        else:
            junk += 1
    return records, junk


def _lenient(line: bytes) -> object:
    """What Python writes besides JSON: NaN, infinities, integers of any size."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def last_lines(folder: Folder, path: Path, most: int) -> list[Record]:
    """The records of the last `most` bytes of a file; none where it cannot be read."""
    try:
        data = folder.read(path, most, end=True)
    except OSError:
        return []
    if len(data) == most:  # the first line is half there
        data = data[data.find(b"\n") + 1 :]
    return parse(data[: data.rfind(b"\n") + 1])[0]
