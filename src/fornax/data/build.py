"""`build`: raw sources to a dataset of ArrayRecord shards, whole or not there at all."""

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fornax.config import to_mapping
from fornax.config.errors import ConfigError, DataError
from fornax.config.files import put_in_place
from fornax.data.files import CACHE_GIB, Storage
from fornax.data.manifest import FILE, Manifest, Shard, Split, read_manifest, write_manifest
from fornax.data.records import Record
from fornax.data.records import Source as OpenSource
from fornax.data.sources import Source, Stdlib
from fornax.data.sources.array_record import open_writer
from fornax.data.tokenizer import Tokenizer, load_tokenizer, train_bpe
from fornax.data.transforms import Chain, Transform, text_of

_READ = 256
_TOKENIZER = "tokenizer"

Progress = Callable[[str, int, int], None]
"""Called with a stage (`train tokenizer`, `write`), records done, records in all."""


@dataclass(frozen=True, kw_only=True)
class TrainBpe:
    """Train a byte-level BPE tokenizer on the training split."""

    type: Literal["train_bpe"] = "train_bpe"
    vocab_size: int = 4096
    """Number of token ids, special tokens and the 256 bytes included."""
    min_frequency: int = 2
    """Pairs seen less often are not merged."""
    max_bytes: int | None = None
    """Train on the first this many bytes of text; none: on all."""


@dataclass(frozen=True, kw_only=True)
class TokenizerFile:
    """Use a tokenizer that exists."""

    type: Literal["file"] = "file"
    path: Path
    """A tokenizer.json, or the folder that holds it."""


@dataclass(frozen=True, kw_only=True)
class BuildConfig:
    """Raw text to a dataset on disk."""

    source: Source = field(default_factory=Stdlib)
    """Where the text comes from."""
    output: Path = Path("dataset")
    """Folder to make."""
    transforms: tuple[Transform, ...] = ()
    """What happens to every record before it is tokenized, in order."""
    tokenizer: TrainBpe | TokenizerFile | None = field(default_factory=TrainBpe)
    """The tokenizer; none: store the text."""
    text_field: str = "text"
    """The field of a record that holds its text."""
    append_eos: bool = True
    """End every document with the end-of-text token."""
    prepend_bos: bool = False
    """Begin every document with the begin token."""
    holdout: float = 0.02
    """Fraction of the records kept for the eval split, chosen by a hash of their text."""
    max_record_tokens: int | None = None
    """Longer documents are stored as several records; none: one record each."""
    shard_bytes: int = 256 * 2**20
    """A shard is closed when it holds this many bytes of records."""
    compression: bool = False
    """Compress records with zstd: smaller files, slower reads."""
    cache_dir: Path | None = None
    """Where remote files are kept; none: data/ in Fornax's cache (FORNAX_CACHE_DIR)."""
    cache_gib: float | None = CACHE_GIB
    """GiB of remote files that are kept, the least recently used leave first; none: no limit."""
    storage_options: dict[str, str] = field(default_factory=dict)
    """Options of the remote file system, such as endpoint_url."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.holdout < 1.0:
            raise ConfigError(f"holdout={self.holdout} must be in [0, 1)")
        if self.shard_bytes < 1:
            raise ConfigError(f"shard_bytes={self.shard_bytes} must be at least 1")
        if self.max_record_tokens is not None:
            if self.max_record_tokens < 2:
                raise ConfigError(f"max_record_tokens={self.max_record_tokens} must be at least 2")
            if self.tokenizer is None:
                raise ConfigError("max_record_tokens needs a tokenizer: text is stored whole")


@dataclass(frozen=True)
class BuildResult:
    """What `build` made or found."""

    path: Path
    manifest: Manifest
    reused: bool
    """Whether the folder already held this very dataset."""


def build(
    config: BuildConfig, *, overwrite: bool = False, progress: Progress | None = None
) -> BuildResult:
    """Make the dataset that `config` describes.

    The folder appears at the end, by a rename: a build that is killed leaves nothing, and the next
    one starts over. A folder that already holds the same dataset is kept.

    Raises:
        DataError: the corpus is empty or unreadable, the disk is full, or `config.output` holds
            another dataset (give `overwrite` to replace it) or other files.
    """
    output = config.output
    storage = Storage(config.cache_dir, config.storage_options, config.cache_gib)
    source = config.source.open(storage)
    described = {**to_mapping(config), "records": _identity(source)}
    described.pop("output")
    existing = _existing(output, described, overwrite=overwrite)
    if existing is not None:
        return BuildResult(output, existing, reused=True)
    temporary = _temporary(output)
    try:
        manifest = _Builder(config, source, temporary, progress).run(described)
        write_manifest(temporary, manifest)
        put_in_place(temporary, output)
    except (OSError, RuntimeError) as error:
        raise DataError(f"{output} cannot be written: {error}; nothing was changed") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return BuildResult(output, manifest, reused=False)


def _identity(source: OpenSource) -> str:
    return hashlib.sha256(source.identity().encode()).hexdigest()[:16]


def _existing(output: Path, described: dict[str, object], *, overwrite: bool) -> Manifest | None:
    """The dataset already there if it is the one described; `DataError` if another thing is."""
    if not output.exists():
        return None
    if not (output / FILE).is_file():
        if output.is_dir() and not any(output.iterdir()):
            return None
        raise DataError(f"{output} exists and is not a dataset: choose another output folder")
    if overwrite:
        return None
    manifest = read_manifest(output)
    changed = sorted(
        key
        for key in described.keys() | manifest.config.keys()
        if described.get(key) != manifest.config.get(key)
    )
    if changed:
        raise DataError(
            f"{output} holds a dataset built with another {', '.join(changed)}: overwrite it or "
            "choose another output folder"
        )
    return manifest


def _temporary(output: Path) -> Path:
    """A fresh folder beside `output`; those that killed builds left are removed."""
    prefix = f".{output.name}.building-"
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        for left in output.parent.glob(f"{prefix}*"):
            if not _is_running(left.name.removeprefix(prefix)):
                shutil.rmtree(left, ignore_errors=True)
        temporary = output.parent / f"{prefix}{os.getpid()}"
        temporary.mkdir()
    except OSError as error:
        raise DataError(f"{output} cannot be made: {error}") from error
    return temporary


def _is_running(process: str) -> bool:
    try:
        os.kill(int(process), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:
        return True
    return int(process) != os.getpid()


class _Builder:
    """One build: reads the source once for the tokenizer and once for the shards."""

    def __init__(
        self, config: BuildConfig, source: OpenSource, directory: Path, progress: Progress | None
    ):
        self._config = config
        self._source = source
        self._directory = directory
        self._progress = progress or (lambda stage, done, total: None)
        self._chain = Chain(config.transforms)
        self._dropped = dict.fromkeys(self._chain.names, 0)

    def run(self, described: dict[str, object]) -> Manifest:
        if len(self._source) == 0:
            raise DataError("the corpus is empty: the source has no records")
        tokenizer = self._tokenizer()
        self._dropped = dict.fromkeys(self._chain.names, 0)
        writers = {name: self._writer(name, tokenizer) for name in self._splits()}
        try:
            for texts in self._texts("write"):
                self._write(texts, tokenizer, writers)
            splits = {name: writer.finish() for name, writer in writers.items()}
        finally:
            for writer in writers.values():
                writer.close()
        self._check(splits)
        if tokenizer is not None:
            tokenizer.save(self._directory / _TOKENIZER)
        return Manifest(
            content=str(tokenizer.dtype.name) if tokenizer is not None else "text",
            splits=splits,
            tokenizer=_TOKENIZER if tokenizer is not None else None,
            vocab_size=tokenizer.vocab_size if tokenizer is not None else None,
            eos_id=tokenizer.eos_id if tokenizer is not None else None,
            bos_id=tokenizer.bos_id if tokenizer is not None else None,
            pad_id=tokenizer.pad_id if tokenizer is not None else None,
            dropped=self._dropped,
            config=described,
        )

    def _splits(self) -> tuple[str, ...]:
        return ("train", "eval") if self._config.holdout else ("train",)

    def _split_of(self, text: str) -> str:
        digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        drawn = int.from_bytes(digest, "little") / 2**64
        return "eval" if drawn < self._config.holdout else "train"

    def _texts(self, stage: str) -> Iterator[list[str]]:
        """Texts after the transforms, in the source's order, some hundred at a time."""
        total = len(self._source)
        for start in range(0, total, _READ):
            indices = list(range(start, min(start + _READ, total)))
            records: list[Record | None] = list(self._source.__getitems__(indices))
            seeds = [(0, 0, 0, index) for index in indices]
            for number, name in enumerate(self._chain.names):
                before = sum(r is not None for r in records)
                records = self._chain.stage(
                    number, records, seeds, lambda i, at=indices: self._source.locate(at[i])
                )
                self._dropped[name] += before - sum(r is not None for r in records)
            yield [
                self._text(record, index)
                for index, record in zip(indices, records, strict=True)
                if record is not None
            ]
            self._progress(stage, indices[-1] + 1, total)

    def _text(self, record: Record, index: int) -> str:
        try:
            return text_of(record, self._config.text_field)
        except DataError as error:
            raise DataError(f"{self._source.locate(index)}: {error}") from error

    def _tokenizer(self) -> Tokenizer | None:
        choice = self._config.tokenizer
        if choice is None:
            return None
        if isinstance(choice, TokenizerFile):
            return load_tokenizer(choice.path)
        texts = self._training_texts(choice.max_bytes)
        return train_bpe(texts, choice.vocab_size, min_frequency=choice.min_frequency)

    def _training_texts(self, max_bytes: int | None) -> Iterator[str]:
        """Texts of the training split, so that the held-out ones stay unseen."""
        used = 0
        for texts in self._texts("train tokenizer"):
            for text in texts:
                if self._split_of(text) != "train":
                    continue
                if max_bytes is not None and used >= max_bytes:
                    return
                used += len(text.encode("utf-8", "surrogatepass"))
                yield text

    def _writer(self, split: str, tokenizer: Tokenizer | None) -> "_SplitWriter":
        del tokenizer
        return _SplitWriter(
            self._directory, split, self._config.shard_bytes, self._config.compression
        )

    def _write(
        self, texts: Sequence[str], tokenizer: Tokenizer | None, writers: dict[str, "_SplitWriter"]
    ) -> None:
        if tokenizer is None:
            for text in texts:
                data = text.encode("utf-8")
                writers[self._split_of(text)].write(data, tokens=0, text_bytes=len(data))
            return
        ids = tokenizer.encode_batch(
            texts, bos=self._config.prepend_bos, eos=self._config.append_eos
        )
        for text, tokens in zip(texts, ids, strict=True):
            writer = writers[self._split_of(text)]
            text_bytes = len(text.encode("utf-8"))
            for piece in self._pieces(tokens):
                writer.write(piece.tobytes(), tokens=len(piece), text_bytes=text_bytes)
                text_bytes = 0  # counted once, with the first piece

    def _pieces(self, tokens: np.ndarray) -> list[np.ndarray]:
        size = self._config.max_record_tokens or len(tokens) or 1
        return [tokens[i : i + size] for i in range(0, len(tokens), size)]

    def _check(self, splits: dict[str, Split]) -> None:
        if not any(split.records for split in splits.values()):
            dropped = ", ".join(f"{name} dropped {n}" for name, n in self._dropped.items() if n)
            raise DataError(
                f"the corpus is empty: no record is left{': ' if dropped else ''}{dropped}"
            )
        for name, split in splits.items():
            if not split.records:
                raise DataError(
                    f"holdout={self._config.holdout} left the {name} split without records: choose "
                    "another fraction, or 0 for no eval split"
                )


class _SplitWriter:
    """Writes the records of one split, a new shard every `shard_bytes`."""

    def __init__(self, directory: Path, split: str, shard_bytes: int, compression: bool):
        self._directory = directory
        self._split = split
        self._shard_bytes = shard_bytes
        self._compression = compression
        self._shards: list[Shard] = []
        self._writer: Any = None
        self._records = self._tokens = self._text_bytes = self._bytes = 0

    def write(self, data: bytes, *, tokens: int, text_bytes: int) -> None:
        if self._writer is None:
            self._writer = open_writer(self._directory / self._file(), self._compression)
        self._writer.write(data)
        self._records += 1
        self._tokens += tokens
        self._text_bytes += text_bytes
        self._bytes += len(data)
        if self._bytes >= self._shard_bytes:
            self._close_shard()

    def _file(self) -> str:
        return f"{self._split}-{len(self._shards):05d}.array_record"

    def _close_shard(self) -> None:
        self._writer.close()
        self._writer = None
        path = self._directory / self._file()
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        self._shards.append(
            Shard(
                file=path.name,
                records=self._records,
                tokens=self._tokens,
                text_bytes=self._text_bytes,
                file_bytes=path.stat().st_size,
                sha256=digest,
            )
        )
        self._records = self._tokens = self._text_bytes = self._bytes = 0

    def finish(self) -> Split:
        if self._writer is not None:
            self._close_shard()
        return Split(shards=tuple(self._shards))

    def close(self) -> None:
        """Close the file when the build failed."""
        if self._writer is not None and self._writer.is_open():
            self._writer.close()
        self._writer = None
