"""Hugging Face datasets on disk (`save_to_disk`): Arrow streams read through memory maps."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fornax.config.errors import ConfigError, DataError
from fornax.data.files import Storage
from fornax.data.records import Record


class HuggingFaceSource:
    """Each row is one record with the chosen columns."""

    def __init__(self, root: str, files: Sequence[str], columns: Sequence[str], storage: Storage):
        self._root = root
        self._locals = [storage.local(storage.join(root, name)) for name in files]
        self._columns = list(columns)
        self._table: Any = None
        self._table = self._open()

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_table": None}

    def _open(self) -> Any:
        import pyarrow as pa

        if self._table is None:
            try:
                tables = [
                    pa.ipc.open_stream(pa.memory_map(str(f))).read_all() for f in self._locals
                ]
                self._table = pa.concat_tables(tables)
            except (OSError, ValueError) as error:
                raise DataError(
                    f"{self._root} holds a damaged Arrow file ({error}): save the dataset again"
                ) from error
            missing = [c for c in self._columns if c not in self._table.column_names]
            if missing:
                raise DataError(
                    f"{self._root} has no column {missing[0]!r}, it has "
                    f"{', '.join(self._table.column_names)}"
                )
            self._table = self._table.select(self._columns or self._table.column_names)
        return self._table

    def __len__(self) -> int:
        return self._open().num_rows

    def __getitem__(self, index: int) -> Record:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Record]:
        return self._open().take(list(indices)).to_pylist()

    def locate(self, index: int) -> str:
        return f"{self._root} row {index}"

    def identity(self) -> str:
        return f"{self._root.rstrip('/').rsplit('/', 1)[-1]}|{len(self)}"


@dataclass(frozen=True, kw_only=True)
class HuggingFace:
    """A dataset saved with `datasets.Dataset.save_to_disk`, or one split of a `DatasetDict`."""

    type: Literal["hugging_face"] = "hugging_face"
    path: str
    """The folder; gs:// and s3:// too."""
    split: str | None = None
    """The split of a DatasetDict; none for a single dataset."""
    columns: tuple[str, ...] = ("text",)
    """Columns to read; empty: all."""

    def __post_init__(self) -> None:
        if not self.path:
            raise ConfigError("hugging_face: path is empty; name a folder made by save_to_disk")

    def open(self, storage: Storage) -> HuggingFaceSource:
        """Map the Arrow files; `DataError` when the folder is none or the split is missing."""
        root = self.path
        if storage.exists(storage.join(root, "dataset_dict.json")):
            splits = _read(storage, storage.join(root, "dataset_dict.json")).get("splits", [])
            if self.split not in splits:
                raise DataError(
                    f"{root} is a DatasetDict with the splits {', '.join(splits)}: "
                    f"set split to one of them, not {self.split}"
                )
            root = storage.join(root, str(self.split))
        elif self.split is not None:
            raise DataError(f"{root} is a single dataset: leave split unset, not {self.split!r}")
        state = storage.join(root, "state.json")
        if not storage.exists(state):
            raise DataError(f"{root} has no state.json: name a folder made by save_to_disk")
        content = _read(storage, state)
        if content.get("_indices_data_files"):
            raise DataError(
                f"{root} keeps an indices mapping: call flatten_indices() and save again"
            )
        files = [entry["filename"] for entry in content["_data_files"]]
        return HuggingFaceSource(root, files, self.columns, storage)


def _read(storage: Storage, address: str) -> dict[str, Any]:
    try:
        return json.loads(Path(storage.local(address)).read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{address} is not valid JSON ({error})") from error
