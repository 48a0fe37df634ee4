"""JSON Lines files, plain or .gz: one object per line."""

import gzip
import hashlib
import json
import mmap
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from fornax.config.errors import ConfigError, DataError
from fornax.data.files import Storage
from fornax.data.records import Record, decode

_BLOCK = 1 << 24


class _LineFile:
    """Random access to the non-empty lines of one file through a memory map."""

    def __init__(self, path: Path, name: str):
        self.name = name
        self._path = path
        self._map: mmap.mmap | None = None
        self.starts, self.ends, self.numbers = _line_index(path)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_map": None}

    def read(self, line: int) -> bytes:
        if self._map is None:
            with self._path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return self._map[int(self.starts[line]) : int(self.ends[line])]


def _line_index(path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Start, end and number (from 1) of every line that is not blank, int64 `[lines]`."""
    breaks: list[np.ndarray] = []
    offset = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            breaks.append(np.flatnonzero(np.frombuffer(block, np.uint8) == 10) + offset)
            offset += len(block)
    ends = np.concatenate([*breaks, np.array([offset], np.int64)]).astype(np.int64)
    starts = np.concatenate([np.zeros(1, np.int64), ends[:-1] + 1])
    numbers = np.arange(1, len(ends) + 1)
    keep = ends > starts
    if offset:
        short = keep & (ends - starts <= 2)
        data = np.memmap(path, np.uint8, "r")
        for line in np.flatnonzero(short):
            keep[line] = bool(bytes(data[starts[line] : ends[line]]).strip())
    return starts[keep], ends[keep], numbers[keep]


class JsonlSource:
    """Each line is one record: the fields of its object."""

    def __init__(self, paths: Sequence[str], storage: Storage):
        self._files = [_LineFile(_plain(path, storage), path) for path in paths]
        counts = [len(file.starts) for file in self._files]
        self._ends = np.cumsum([0, *counts])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def _place(self, index: int) -> tuple[_LineFile, int]:
        number = int(np.searchsorted(self._ends, index, side="right")) - 1
        return self._files[number], int(index - self._ends[number])

    def __getitem__(self, index: int) -> Record:
        file, line = self._place(index)
        where = self.locate(index)
        try:
            value = json.loads(decode(file.read(line), where))
        except ValueError as error:
            raise DataError(
                f"{where} is not valid JSON ({error}): fix or remove the line"
            ) from error
        if not isinstance(value, dict):
            raise DataError(f"{where} is {type(value).__name__}, it must be a JSON object")
        return value

    def __getitems__(self, indices: Sequence[int]) -> list[Record]:
        return [self[index] for index in indices]

    def locate(self, index: int) -> str:
        file, line = self._place(index)
        return f"{file.name} line {file.numbers[line]}"

    def identity(self) -> str:
        return ";".join(f"{f.name.rsplit('/', 1)[-1]}:{len(f.starts)}" for f in self._files)


def _plain(path: str, storage: Storage) -> Path:
    """The local uncompressed file; a .gz is unpacked once into the cache."""
    local = storage.local(path)
    if not path.endswith(".gz"):
        return local
    stat = local.stat()
    key = hashlib.sha256(f"{local.resolve()}:{stat.st_size}:{stat.st_mtime_ns}".encode())

    def unpack(partial: Path) -> None:
        with gzip.open(local, "rb") as packed, partial.open("wb") as out:
            while block := packed.read(_BLOCK):
                out.write(block)

    try:
        name = local.name.removesuffix(".gz")
        return storage.cache.get(key.hexdigest()[:24], name, _unpacked_size(local), unpack)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path} is not a whole gzip file ({error}): copy it again") from error


def _unpacked_size(path: Path) -> int:
    """Bytes of a gzip file's contents, modulo 4 GiB, as its last four say (RFC 1952)."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 4))
        return max(size, int.from_bytes(file.read(4), "little"))


@dataclass(frozen=True, kw_only=True)
class Jsonl:
    """JSON Lines files, plain or .gz."""

    type: Literal["jsonl"] = "jsonl"
    path: str | tuple[str, ...]
    """Files, folders or globs, gs:// and s3:// too; or a dataset on the Hub, `org/name`."""

    def __post_init__(self) -> None:
        if not self.path:
            raise ConfigError("jsonl: path is empty; name files, a folder or a glob")

    def open(self, storage: Storage) -> JsonlSource:
        """Index the lines; `DataError` when a path matches no file."""
        return JsonlSource(storage.expand(self.path, ("*.jsonl", "*.jsonl.gz")), storage)
