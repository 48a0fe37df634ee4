"""ArrayRecord files: random access by position, read in batches."""

import bisect
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fornax.config.errors import ConfigError, DataError
from fornax.data.files import Storage
from fornax.data.records import Record, decode

# Random access: no read-ahead, and a small buffer per file.
_READER_OPTIONS = "readahead_buffer_size:0"
_READER_BUFFER = 32768


class ArrayRecordFiles:
    """The byte records of several ArrayRecord files as one sequence; readers open on first use.

    Raises `DataError` for a file that is missing or damaged.
    """

    def __init__(self, paths: Sequence[str], storage: Storage, counts: Sequence[int] | None = None):
        self._paths = list(paths)
        self._storage = storage
        self._readers: dict[int, Any] = {}
        self._lock = threading.Lock()
        self._expected = list(counts) if counts is not None else None
        if counts is None:
            counts = [self._reader(i).num_records() for i in range(len(self._paths))]
        self._counts = list(counts)
        self._ends = list(accumulate(self._counts))

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_readers": {}, "_lock": None}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def _place(self, index: int) -> tuple[int, int]:
        if not 0 <= index < len(self):
            raise DataError(f"record {index} is outside [0, {len(self)})")
        file = bisect.bisect_right(self._ends, index)
        return file, index - (self._ends[file] - self._counts[file])

    def _reader(self, file: int) -> Any:
        reader = self._readers.get(file)
        if reader is None:
            with self._lock:
                reader = self._readers.get(file)
                if reader is None:
                    reader = self._readers[file] = self._open(file)
        return reader

    def _open(self, file: int) -> Any:
        from array_record.python import array_record_module

        path = self._storage.local(self._paths[file])
        try:
            reader = array_record_module.ArrayRecordReader(
                str(path), options=_READER_OPTIONS, file_reader_buffer_size=_READER_BUFFER
            )
            if not reader.ok():
                # The reader of a damaged file opens; its first read says what is wrong.
                reader.read([0])
            found = reader.num_records()
        except (RuntimeError, ValueError, OSError, IndexError) as error:
            raise _damaged(self._paths[file], error) from error
        if self._expected is not None and found != self._expected[file]:
            raise DataError(
                f"{self._paths[file]} holds {found} records where its dataset.json says "
                f"{self._expected[file]}: build the dataset again"
            )
        return reader

    def read(self, indices: Sequence[int]) -> list[bytes]:
        """The records at `indices`, in that order: one batched read per file."""
        wanted = np.asarray(indices, np.int64)
        if len(wanted) and not 0 <= wanted.min() <= wanted.max() < len(self):
            raise DataError(f"records {wanted.min()} to {wanted.max()} exceed [0, {len(self)})")
        files = np.searchsorted(self._ends, wanted, side="right")
        out: list[bytes] = [b""] * len(wanted)
        for file in np.unique(files).tolist():
            slots = np.flatnonzero(files == file)
            positions = wanted[slots] - (self._ends[file] - self._counts[file])
            try:
                values = self._reader(file).read(positions.tolist())
            except (RuntimeError, ValueError, OSError, IndexError) as error:
                raise _damaged(self._paths[file], error) from error
            for slot, value in zip(slots.tolist(), values, strict=True):
                out[slot] = value
        return out

    def locate(self, index: int) -> str:
        """File and position of a record."""
        file, position = self._place(index)
        return f"{self._paths[file]} record {position}"

    def identity(self) -> str:
        """File names (without folders) and record counts."""
        names = (path.rsplit("/", 1)[-1] for path in self._paths)
        return ";".join(f"{n}:{c}" for n, c in zip(names, self._counts, strict=True))


def _damaged(path: str, error: Exception) -> DataError:
    reason = " ".join(str(error).split())[:200]
    return DataError(
        f"{path} is not a whole ArrayRecord file, it may be truncated ({reason}): "
        "copy it again or rebuild the dataset"
    )


Content = Literal["text", "uint16", "uint32", "bytes"]


def decode_record(data: bytes, content: str, where: str) -> Record:
    """Turn stored bytes into a record: `text` is UTF-8, `uint16`/`uint32` little-endian tokens."""
    if content == "text":
        return {"text": decode(data, where)}
    if content == "bytes":
        return {"bytes": data}
    return {"tokens": np.frombuffer(data, dtype="<u2" if content == "uint16" else "<u4")}


class ArrayRecordSource:
    """Decoded records of ArrayRecord files."""

    def __init__(self, files: ArrayRecordFiles, content: str):
        self._files = files
        self._content = content

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> Record:
        return self.__getitems__([index])[0]

    @property
    def holds_tokens(self) -> bool:
        """Whether records are token ids, which `read_tokens` reads without a dict around each."""
        return self._content in ("uint16", "uint32")

    def read_tokens(self, indices: Sequence[int]) -> list[np.ndarray]:
        """The token ids of the records at `indices`, uint16 or uint32 `[n]` each."""
        dtype = np.dtype("<u2" if self._content == "uint16" else "<u4")
        return [np.frombuffer(item, dtype) for item in self._files.read(indices)]

    def __getitems__(self, indices: Sequence[int]) -> list[Record]:
        if self.holds_tokens:
            return [{"tokens": tokens} for tokens in self.read_tokens(indices)]
        data = self._files.read(indices)
        return [
            decode_record(item, self._content, self.locate(index))
            for index, item in zip(indices, data, strict=True)
        ]

    def locate(self, index: int) -> str:
        return self._files.locate(index)

    def identity(self) -> str:
        return f"{self._content}|{self._files.identity()}"


@dataclass(frozen=True, kw_only=True)
class ArrayRecord:
    """ArrayRecord files written by any tool."""

    type: Literal["array_record"] = "array_record"
    path: str | tuple[str, ...]
    """Files, globs or folders; gs:// and s3:// too."""
    content: Content = "text"
    """What a record's bytes are: UTF-8 text, token ids, or bytes left to a transform."""

    def __post_init__(self) -> None:
        if not self.path:
            raise ConfigError("array_record: path is empty; name files, a glob or a folder")

    def open(self, storage: Storage) -> ArrayRecordSource:
        """Open the files; `DataError` when one is missing or damaged."""
        return ArrayRecordSource(ArrayRecordFiles(storage.expand(self.path), storage), self.content)


def write_options(compression: bool) -> str:
    """Writer options for random access: one record per chunk."""
    return "group_size:1,zstd" if compression else "group_size:1,uncompressed"


def open_writer(path: Path, compression: bool) -> Any:
    """An ArrayRecord writer of `path`."""
    from array_record.python import array_record_module

    return array_record_module.ArrayRecordWriter(str(path), write_options(compression))
