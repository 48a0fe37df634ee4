"""Parquet files: one record per row, read by row group."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fornax.config.errors import ConfigError, DataError
from fornax.data.files import Storage
from fornax.data.records import Record

# Row groups kept decoded: shuffled access comes back to each many times.
_GROUPS_KEPT = 64


class ParquetSource:
    """Each row is one record with the chosen columns."""

    def __init__(self, paths: Sequence[str], columns: Sequence[str], storage: Storage):
        self._paths = list(paths)
        self._locals = [storage.local(path) for path in paths]
        self._columns = list(columns)
        self._groups: list[tuple[int, int]] = []
        counts = [0]
        for number, (path, local) in enumerate(zip(self._paths, self._locals, strict=True)):
            metadata = _open(local, path).metadata
            self._check_columns(
                path, [metadata.schema.column(i).path for i in range(metadata.num_columns)]
            )
            for group in range(metadata.num_row_groups):
                self._groups.append((number, group))
                counts.append(metadata.row_group(group).num_rows)
        self._ends = np.cumsum(counts)
        self._kept: OrderedDict[int, Any] = OrderedDict()

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_kept": OrderedDict()}

    def _check_columns(self, path: str, found: list[str]) -> None:
        roots = {name.split(".")[0] for name in found}
        for column in self._columns:
            if column not in roots:
                raise DataError(
                    f"{path} has no column {column!r}, it has {', '.join(sorted(roots))}"
                )

    def __len__(self) -> int:
        return int(self._ends[-1])

    def _place(self, index: int) -> tuple[int, int]:
        group = int(np.searchsorted(self._ends, index, side="right")) - 1
        return group, int(index - self._ends[group])

    def _table(self, group: int) -> Any:
        table = self._kept.pop(group, None)
        if table is None:
            number, row_group = self._groups[group]
            file = _open(self._locals[number], self._paths[number])
            try:
                table = file.read_row_group(row_group, columns=self._columns or None)
            except (OSError, ValueError) as error:
                raise _damaged(self._paths[number], error) from error
        self._kept[group] = table
        if len(self._kept) > _GROUPS_KEPT:
            self._kept.popitem(last=False)
        return table

    def __getitem__(self, index: int) -> Record:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Record]:
        places = [self._place(index) for index in indices]
        out: list[Record] = [{}] * len(places)
        for group in sorted({group for group, _ in places}):
            slots = [slot for slot, place in enumerate(places) if place[0] == group]
            rows = self._table(group).take([places[slot][1] for slot in slots]).to_pylist()
            for slot, row in zip(slots, rows, strict=True):
                out[slot] = row
        return out

    def locate(self, index: int) -> str:
        group, row = self._place(index)
        number, row_group = self._groups[group]
        return f"{self._paths[number]} row group {row_group} row {row}"

    def identity(self) -> str:
        names = ";".join(path.rsplit("/", 1)[-1] for path in self._paths)
        return f"{names}|{len(self)}"


def _open(local: Path, path: str) -> Any:
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(local, memory_map=True)
    except (OSError, ValueError) as error:
        raise _damaged(path, error) from error


def _damaged(path: str, error: Exception) -> DataError:
    reason = " ".join(str(error).split())[:200]
    return DataError(f"{path} is not a whole Parquet file ({reason}): copy it again")


@dataclass(frozen=True, kw_only=True)
class Parquet:
    """Parquet files."""

    type: Literal["parquet"] = "parquet"
    path: str | tuple[str, ...]
    """Files, folders or globs, gs:// and s3:// too; or a dataset on the Hub, `org/name`."""
    columns: tuple[str, ...] = ("text",)
    """Columns to read; empty: all."""

    def __post_init__(self) -> None:
        if not self.path:
            raise ConfigError("parquet: path is empty; name files, a folder or a glob")

    def open(self, storage: Storage) -> ParquetSource:
        """Read the files' metadata; `DataError` for a damaged file or a missing column."""
        return ParquetSource(storage.expand(self.path, ("*.parquet",)), self.columns, storage)
