"""A configuration opened for one split: its sources, the order of its records, its packers."""

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from fornax.config.errors import ConfigError, DataError
from fornax.data.config import DataConfig
from fornax.data.files import Storage
from fornax.data.order import Order
from fornax.data.packing import Packer, Position
from fornax.data.sources import Dataset, Mixture, Part
from fornax.data.stream import PartReader, ShardStream, SpanReader, StageTimes
from fornax.data.transforms import Chain


@dataclass(frozen=True)
class Pipeline:
    """An opened configuration for one split; everything that makes rows, nothing that moves."""

    config: DataConfig
    order: Order
    parts: tuple[PartReader, ...]
    seq_len: int
    batch_size: int
    skip_steps: tuple[tuple[int, int], ...] = ()
    """Ranges of batches that are made and thrown away."""
    reader: SpanReader | None = None
    """What reads and transforms records in place of this process."""

    @property
    def rows_per_shard(self) -> int:
        """Rows that each virtual shard gives to a batch."""
        return self.batch_size // self.config.virtual_shards

    @property
    def tokens(self) -> int:
        """Places for tokens in a global batch."""
        return self.batch_size * self.seq_len

    @property
    def stored(self) -> bool:
        """Whether all records are stored tokens, which nothing transforms or leaves out."""
        return all(part.stored_tokens is not None for part in self.parts)

    def stream(self, shard: int, times: StageTimes | None = None) -> ShardStream:
        """The documents of one virtual shard."""
        read_batch, check = self.config.read_batch, self.config.debug
        return ShardStream(shard, self.order, self.parts, read_batch, check, times, self.reader)

    def packer(self, shard: int, position: Position, times: StageTimes | None = None) -> Packer:
        """The packer of one virtual shard, from a position on."""
        seed = int(np.random.SeedSequence((self.config.seed, shard)).generate_state(1)[0])
        return self.config.packing.packer(self.stream(shard, times), self.seq_len, position, seed)

    def identity(self) -> dict[str, Any]:
        """What a position depends on; a position of another identity cannot be taken up."""
        records = [
            (part.name, len(part), part.source.identity(), part.chain.names) for part in self.parts
        ]
        text = json.dumps([records, self.order.draws])
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        return {
            "virtual_shards": self.config.virtual_shards,
            "seq_len": self.seq_len,
            "batch_size": self.batch_size,
            "packing": asdict(self.config.packing),
            "seed": self.config.seed,
            "shuffle": self.config.shuffle,
            "records": digest,
        }


def open_pipeline(config: DataConfig, *, batch_size: int, seq_len: int, split: str) -> Pipeline:
    """Open the sources of a split.

    Raises `DataError` for sources that are missing, damaged or empty, and `ConfigError` for a batch
    that does not divide into the virtual shards.
    """
    config.check_batch_size(batch_size)
    if seq_len < 1:
        raise DataError(f"seq_len={seq_len} must be at least 1")
    parts = tuple(_open_parts(config, split))
    order = Order(
        [part.name for part in parts],
        [len(part) for part in parts],
        _weights(config, split),
        shards=config.virtual_shards,
        seed=config.seed,
        shuffle=config.shuffle and split == "train",
        epochs=config.epochs if split == "train" else 1,
    )
    skipped = tuple((r.start, r.stop) for r in config.skip_steps) if split == "train" else ()
    return Pipeline(config, order, parts, seq_len, batch_size, skipped)


def _parts_of(config: DataConfig, split: str) -> tuple[Part, ...]:
    source = config.source
    if split == "eval" and config.eval_source is not None:
        source = config.eval_source
    return source.parts if isinstance(source, Mixture) else (Part(name="main", source=source),)


def _weights(config: DataConfig, split: str) -> list[float]:
    return [part.weight for part in _parts_of(config, split)]


def _open_parts(config: DataConfig, split: str) -> list[PartReader]:
    storage = config.storage()
    parts = _parts_of(config, split)
    unknown = {r.part for r in config.skip_records} - {
        part.name for part in _parts_of(config, "train")
    }
    if unknown:
        raise ConfigError(
            f"skip_records: there is no part {sorted(unknown)[0]!r}; the parts are "
            f"{', '.join(part.name for part in _parts_of(config, 'train'))}"
        )
    return [_open_part(config, part, split, storage) for part in parts]


def _open_part(config: DataConfig, part: Part, split: str, storage: Storage) -> PartReader:
    own_source = split == "eval" and config.eval_source is not None
    selected = None
    if isinstance(part.source, Dataset):
        source = part.source.open(storage, split)
    else:
        source = part.source.open(storage)
        if not own_source:
            selected = _holdout(len(source), config, split, part.name)
    chain = Chain((*part.transforms, *config.transforms))
    skipped = tuple(
        (r.start, r.stop) for r in config.skip_records if r.part == part.name and split == "train"
    )
    reader = PartReader(part.name, source, selected, chain, skipped)
    if len(reader) == 0:
        raise DataError(f"{part.name}: the {split} split has no records: the corpus is empty")
    return reader


def _holdout(records: int, config: DataConfig, split: str, name: str) -> np.ndarray | None:
    """Source indices of a split of a raw source, chosen before any shuffling."""
    if split not in ("train", "eval"):
        raise DataError(f"{name}: a raw source has the splits train and eval, not {split!r}")
    if config.holdout == 0.0:
        if split == "train":
            return None
        raise DataError(
            f"{name}: there is no eval split: set holdout to a fraction, or eval_source"
        )
    drawn = np.random.default_rng(config.seed).random(records) < config.holdout
    return np.flatnonzero(drawn if split == "eval" else ~drawn)
