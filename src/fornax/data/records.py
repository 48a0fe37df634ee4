"""A record is a dict; a source is a sequence of records that says where one lies."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from fornax.config.errors import DataError

Record = dict[str, Any]
"""Fields of one document: `text` (str) or `tokens` (integer array), and whatever the source has."""


@runtime_checkable
class Source(Protocol):
    """Random access to records (Grain's `RandomAccessDataSource`, with batches and addresses)."""

    def __len__(self) -> int:
        """Number of records."""
        ...

    def __getitem__(self, index: int) -> Record:
        """The record at `index`."""
        ...

    def __getitems__(self, indices: Sequence[int]) -> list[Record]:
        """The records at `indices`, in that order."""
        ...

    def locate(self, index: int) -> str:
        """Where record `index` lies, for error messages: file, line or position in it."""
        ...

    def identity(self) -> str:
        """A text that changes when the records do: names and sizes, not contents."""
        ...


def as_record(value: object) -> Record:
    """Wrap what a custom source returns: str -> text, integer array or list -> tokens."""
    if isinstance(value, dict):
        return value
    if isinstance(value, str):
        return {"text": value}
    if isinstance(value, bytes):
        return {"text": decode(value, "bytes returned by the source")}
    if isinstance(value, np.ndarray | list | tuple):
        return {"tokens": np.asarray(value)}
    raise DataError(
        f"a source returned {type(value).__name__}: return a dict, str, bytes or an array of tokens"
    )


def decode(data: bytes, where: str) -> str:
    """UTF-8 text of `data`; `DataError` naming the offending byte otherwise."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where} is not UTF-8 text (byte {error.start} is 0x{data[error.start]:02x}): "
            "convert the file, or leave it out"
        ) from error
