"""Problems of data files, collected over whole files and reported several at once."""

from collections.abc import Iterator
from contextlib import contextmanager

from fornax.config.errors import DataError, FornaxError

__all__ = ["Problems"]

_SHOWN = 5


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
        if len(self._first) < _SHOWN:
            self._first.append(f"{where}: {message}")

    @contextmanager
    def of(self, where: str) -> Iterator[None]:
        """Note what the body finds wrong with a record, and go on."""
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
