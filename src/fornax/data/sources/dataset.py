"""A dataset that `fornax data build` made: ArrayRecord shards described by `dataset.json`."""

from dataclasses import dataclass
from typing import Literal

from fornax.config.errors import ConfigError, DataError
from fornax.data.files import Storage
from fornax.data.manifest import read_manifest
from fornax.data.sources.array_record import ArrayRecordFiles, ArrayRecordSource


class DatasetSource(ArrayRecordSource):
    """One split of a built dataset."""

    def __init__(self, files: ArrayRecordFiles, content: str, fingerprint: str, tokens: int):
        super().__init__(files, content)
        self._fingerprint = fingerprint
        self.tokens = tokens
        """Of all its records; 0 where they are text."""

    def identity(self) -> str:
        return f"{self._fingerprint}|{super().identity()}"


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """A folder made by `fornax data build`, with its own train and eval splits."""

    type: Literal["dataset"] = "dataset"
    path: str = ""
    """The folder that holds dataset.json; gs:// and s3:// too."""

    def __post_init__(self) -> None:
        if self.path == "":
            return
        if self.path.endswith("dataset.json"):
            raise ConfigError(f"dataset: path={self.path} is a file; name the folder that holds it")

    def open(self, storage: Storage, split: str = "train") -> DatasetSource:
        """Open a split; `DataError` when the folder or the split is missing."""
        if not self.path:
            raise DataError("dataset: path is not set; name a folder made by fornax data build")
        manifest = read_manifest(self.path, storage)
        if split not in manifest.splits:
            raise DataError(
                f"{self.path} has no split {split!r}, it has {', '.join(sorted(manifest.splits))}"
            )
        shards = manifest.splits[split].shards
        paths = [storage.join(self.path, shard.file) for shard in shards]
        files = ArrayRecordFiles(paths, storage, [shard.records for shard in shards])
        tokens = manifest.splits[split].tokens
        return DatasetSource(files, manifest.content, manifest.fingerprint, tokens)
