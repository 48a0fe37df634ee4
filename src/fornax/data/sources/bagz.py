"""Bagz files: random access to byte records."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from fornax.config.errors import ConfigError, DataError
from fornax.data.files import Storage
from fornax.data.records import Record
from fornax.data.sources.array_record import Content, decode_record


class BagzSource:
    """Decoded records of Bagz files; readers open on first use in each process."""

    def __init__(self, paths: Sequence[str], content: str, storage: Storage):
        self._paths = list(paths)
        self._locals = [storage.local(path) for path in paths]
        self._content = content
        self._readers: dict[int, Any] = {}
        self._ends = np.cumsum([0, *(len(self._reader(i)) for i in range(len(paths)))])

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_readers": {}}

    def _reader(self, file: int) -> Any:
        if file not in self._readers:
            self._readers[file] = _open(str(self._locals[file]), self._paths[file])
        return self._readers[file]

    def __len__(self) -> int:
        return int(self._ends[-1])

    def _place(self, index: int) -> tuple[int, int]:
        file = int(np.searchsorted(self._ends, index, side="right")) - 1
        return file, int(index - self._ends[file])

    def __getitem__(self, index: int) -> Record:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Record]:
        places = [self._place(index) for index in indices]
        out: list[Record] = [{}] * len(places)
        for file in sorted({file for file, _ in places}):
            slots = [slot for slot, place in enumerate(places) if place[0] == file]
            try:
                data = self._reader(file).read_indices([places[slot][1] for slot in slots])
            except (ValueError, RuntimeError, OSError) as error:
                raise _damaged(self._paths[file], error) from error
            for slot, item in zip(slots, data, strict=True):
                out[slot] = decode_record(item, self._content, self.locate(indices[slot]))
        return out

    def locate(self, index: int) -> str:
        file, position = self._place(index)
        return f"{self._paths[file]} record {position}"

    def identity(self) -> str:
        names = ";".join(path.rsplit("/", 1)[-1] for path in self._paths)
        return f"{self._content}|{names}|{len(self)}"


def _open(local: str, path: str) -> Any:
    try:
        import bagz
    except ImportError as error:
        raise DataError(
            "bagz files need the package bagz: pip install 'fornax-ai[bagz]'"
        ) from error
    try:
        return bagz.Reader(local)
    except (ValueError, RuntimeError, OSError) as error:
        raise _damaged(path, error) from error


def _damaged(path: str, error: Exception) -> DataError:
    reason = " ".join(str(error).split())[:200]
    return DataError(f"{path} is not a whole Bagz file ({reason}): copy it again")


@dataclass(frozen=True, kw_only=True)
class Bagz:
    """Bagz files."""

    type: Literal["bagz"] = "bagz"
    path: str | tuple[str, ...]
    """Files or globs; gs:// and s3:// too."""
    content: Content = "text"
    """What a record's bytes are: UTF-8 text, token ids, or bytes left to a transform."""

    def __post_init__(self) -> None:
        if not self.path:
            raise ConfigError("bagz: path is empty; name files or a glob")

    def open(self, storage: Storage) -> BagzSource:
        """Open the files; `DataError` when one is missing or damaged."""
        return BagzSource(storage.expand(self.path), self.content, storage)
