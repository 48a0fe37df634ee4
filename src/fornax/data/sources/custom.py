"""A source of yours: any class with `__len__` and `__getitem__`, by import path."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from fornax.config import ConfigError, DataError, FornaxError, load_object
from fornax.data.files import Storage
from fornax.data.records import Record, as_record
from fornax.data.transforms import Scalar


class CustomSource:
    """Gives a user's random-access object batches, addresses and an identity."""

    def __init__(self, target: str, inner: Any):
        self._target = target
        self._inner = inner

    def __len__(self) -> int:
        return len(self._inner)

    def __getitem__(self, index: int) -> Record:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Record]:
        read = getattr(self._inner, "__getitems__", None)
        if read is not None:
            try:
                return [as_record(value) for value in read(list(indices))]
            except Exception:
                if len(indices) == 1:
                    self._fail(indices[0])
                # One of several failed: the loop below finds and names it.
        return [self._one(index) for index in indices]

    def _one(self, index: int) -> Record:
        try:
            return as_record(self._inner[index])
        except FornaxError:
            raise
        except Exception as error:
            raise self._failure(index, error) from error

    def _fail(self, index: int) -> None:
        self._one(index)

    def _failure(self, index: int, error: Exception) -> DataError:
        return DataError(f"{self.locate(index)} failed: {type(error).__name__}: {error}")

    def locate(self, index: int) -> str:
        return f"{self._target} record {index}"

    def identity(self) -> str:
        return f"{self._target}:{len(self)}"


@dataclass(frozen=True, kw_only=True)
class PythonSource:
    """A class or function of yours that gives random access to records.

    It needs `__len__` and `__getitem__` (a Grain `RandomAccessDataSource`); a record is a dict with
    `text` or `tokens`, a str, or an array of tokens.
    """

    type: Literal["python"] = "python"
    target: str
    """`package.module:NAME` of a class, or of a function that returns the object."""
    arguments: dict[str, Scalar] = field(default_factory=dict)
    """Keyword arguments of the class or function."""

    def open(self, storage: Storage) -> CustomSource:
        """Build the object; `ConfigError` when the target gives no random access."""
        del storage  # the target opens its own files
        made = load_object(self.target)
        try:
            inner = made(**self.arguments) if callable(made) else made
        except TypeError as error:
            raise ConfigError(f"source {self.target!r} cannot be built: {error}") from error
        missing = [name for name in ("__len__", "__getitem__") if not hasattr(inner, name)]
        if missing:
            raise ConfigError(
                f"source {self.target!r} is {type(inner).__name__} without {' and '.join(missing)}"
            )
        return CustomSource(self.target, inner)
