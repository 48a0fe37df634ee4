"""Text files, one document per file."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fornax.config.errors import ConfigError
from fornax.data.files import Storage
from fornax.data.records import Record, decode


class TextSource:
    """Each file is one record: `text` and `path`."""

    def __init__(self, paths: Sequence[str], storage: Storage):
        self._paths = list(paths)
        self._storage = storage

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> Record:
        path = self._paths[index]
        return {"text": decode(self._storage.local(path).read_bytes(), path), "path": path}

    def __getitems__(self, indices: Sequence[int]) -> list[Record]:
        return [self[index] for index in indices]

    def locate(self, index: int) -> str:
        return self._paths[index]

    def identity(self) -> str:
        return ";".join(path.rsplit("/", 1)[-1] for path in self._paths)


@dataclass(frozen=True, kw_only=True)
class Text:
    """UTF-8 text files, one document each."""

    type: Literal["text"] = "text"
    path: str | tuple[str, ...]
    """Files, folders (everything below), or globs such as `books/**/*.txt`; gs:// and s3:// too."""

    def __post_init__(self) -> None:
        if not self.path:
            raise ConfigError("text: path is empty; name files, a folder or a glob")

    def open(self, storage: Storage) -> TextSource:
        """List the files; `DataError` when a path matches none."""
        return TextSource(storage.expand(self.path, ("*.txt",)), storage)
