"""`dataset.json`: what a built dataset holds. Written last, so a folder that has it is whole."""

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fornax.config.errors import DataError
from fornax.data.files import Storage

FILE = "dataset.json"
VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One ArrayRecord file; tokens are 0 where it stores text, sizes are in bytes."""

    file: str
    records: int
    tokens: int
    text_bytes: int
    file_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Split:
    """The shards of one split, in order."""

    shards: tuple[Shard, ...] = ()

    @property
    def records(self) -> int:
        """Records of the split."""
        return sum(shard.records for shard in self.shards)

    @property
    def tokens(self) -> int:
        """Tokens of the split, 0 when it stores text."""
        return sum(shard.tokens for shard in self.shards)

    @property
    def text_bytes(self) -> int:
        """Bytes of the UTF-8 text the split was made from."""
        return sum(shard.text_bytes for shard in self.shards)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What `dataset.json` says."""

    content: str
    """uint16, uint32 or text."""
    splits: dict[str, Split]
    tokenizer: str | None = None
    """Folder of the tokenizer inside the dataset."""
    vocab_size: int | None = None
    eos_id: int | None = None
    bos_id: int | None = None
    pad_id: int | None = None
    dropped: dict[str, int] = field(default_factory=dict)
    """Records that each transform dropped."""
    config: dict[str, Any] = field(default_factory=dict)
    """The configuration it was built from."""
    version: int = VERSION

    @property
    def fingerprint(self) -> str:
        """A hash of every shard's contents."""
        return fingerprint_of(self.content, self.splits)


def fingerprint_of(content: str, splits: dict[str, Split]) -> str:
    """Sixteen hexadecimal digits over the shards' SHA-256."""
    digest = hashlib.sha256(content.encode())
    for name in sorted(splits):
        digest.update(name.encode())
        for shard in splits[name].shards:
            digest.update(f"{shard.records}:{shard.sha256};".encode())
    return digest.hexdigest()[:16]


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write `dataset.json` into a folder."""
    content = {**asdict(manifest), "fingerprint": manifest.fingerprint}
    (directory / FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read_manifest(root: str | Path, storage: Storage | None = None) -> Manifest:
    """Read a dataset's `dataset.json`; `DataError` when it is missing or of another version."""
    storage = storage or Storage()
    address = storage.join(root, FILE)
    if not storage.exists(address):
        raise DataError(
            f"{root} is not a finished dataset: it has no {FILE}; make one with fornax data build"
        )
    try:
        content = json.loads(storage.local(address).read_text(encoding="utf-8"))
        version = content.get("version")
        if version != VERSION:
            raise DataError(
                f"{address} has version {version}, this Fornax reads {VERSION}: rebuild it"
            )
        content.pop("fingerprint")
        splits = {
            name: Split(shards=tuple(Shard(**shard) for shard in split["shards"]))
            for name, split in content.pop("splits").items()
        }
        return Manifest(splits=splits, **content)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(f"{address} is damaged ({error}): build the dataset again") from error
