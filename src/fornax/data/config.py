"""The configuration of a pipeline: where records come from, what happens to them, how they pack."""

from dataclasses import dataclass, field
from pathlib import Path

from fornax.config.errors import ConfigError
from fornax.data.files import CACHE_GIB, Storage
from fornax.data.packing import ConcatThenSplit, Packing
from fornax.data.sources import Mixture, Source
from fornax.data.sources.dataset import Dataset
from fornax.data.transforms import Transform


@dataclass(frozen=True, kw_only=True)
class StepRange:
    """Batches `start` up to, not including, `stop`."""

    start: int
    """First batch to leave out, counted from 0 over all batches of the run."""
    stop: int
    """First batch to keep again."""

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise ConfigError(
                f"start={self.start}, stop={self.stop}: a range needs 0 <= start < stop"
            )


@dataclass(frozen=True, kw_only=True)
class RecordRange:
    """Records `start` up to, not including, `stop` of one source, by index in it."""

    start: int
    """First record to leave out."""
    stop: int
    """First record to keep again."""
    part: str = "main"
    """Name of the mixture part; `main` when the source is not a mixture."""

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise ConfigError(
                f"start={self.start}, stop={self.stop}: a range needs 0 <= start < stop"
            )


@dataclass(frozen=True, kw_only=True)
class Prefetch:
    """Batches made ahead of the trainer, without changing them or the saved position."""

    buffer: int = 16
    """Batches ready ahead of time; 0: make each when asked for."""
    workers: int = 0
    """Processes that share the virtual shards; 0: a thread, enough for tokenized data."""

    def __post_init__(self) -> None:
        if self.buffer < 0 or self.workers < 0:
            raise ConfigError(
                f"buffer={self.buffer}, workers={self.workers}: neither may be negative"
            )
        if self.workers and not self.buffer:
            raise ConfigError(f"workers={self.workers} need a buffer of at least 1")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Batches of packed tokens from a source or a mixture of sources."""

    source: Source | Mixture = field(default_factory=Dataset)
    """Where records come from."""
    eval_source: Source | Mixture | None = None
    """Records of the eval split; none: the dataset's own, or `holdout` of a raw source."""
    holdout: float = 0.0
    """Fraction of a raw source's records kept out of training for the eval split."""
    transforms: tuple[Transform, ...] = ()
    """What happens to every record, in order; the last must leave `tokens`."""
    packing: Packing = field(default_factory=ConcatThenSplit)
    """How documents become rows."""
    shuffle: bool = True
    """A new order of all records in every epoch."""
    seed: int = 0
    """Seed of the order and of random transforms."""
    epochs: int | None = None
    """Passes over the training records; none: without end."""
    virtual_shards: int = 8
    """Streams that the data is dealt to, fixed for the life of a run; it divides the batch size.
    Hosts share them evenly or not; with more hosts than shards some read the same one."""
    skip_steps: tuple[StepRange, ...] = ()
    """Batches to leave out, for instance those before a loss spike."""
    skip_records: tuple[RecordRange, ...] = ()
    """Records to leave out of training."""
    read_batch: int | None = None
    """Most records of one read; none: 2048 of stored tokens, 64 where transforms run."""
    prefetch: Prefetch = field(default_factory=Prefetch)
    """Batches made ahead of time."""
    cache_dir: Path | None = None
    """Where remote files are kept; none: data/ in Fornax's cache (FORNAX_CACHE_DIR)."""
    cache_gib: float | None = CACHE_GIB
    """GiB of remote files that are kept, the least recently used leave first; none: no limit."""
    storage_options: dict[str, str] = field(default_factory=dict)
    """Options of the remote file system, such as endpoint_url."""
    debug: bool = False
    """Run without prefetch and check every record's fields and token ids."""

    def __post_init__(self) -> None:
        if self.virtual_shards < 1:
            raise ConfigError(f"virtual_shards={self.virtual_shards} must be at least 1")
        if self.read_batch is not None and self.read_batch < 1:
            raise ConfigError(f"read_batch={self.read_batch} must be at least 1")
        if not 0.0 <= self.holdout < 1.0:
            raise ConfigError(f"holdout={self.holdout} must be in [0, 1)")
        if self.seed < 0:
            raise ConfigError(f"seed={self.seed} must not be negative")
        if self.epochs is not None and self.epochs < 1:
            raise ConfigError(f"epochs={self.epochs} must be at least 1, or none for no end")
        if self.cache_gib is not None and self.cache_gib <= 0:
            raise ConfigError(f"cache_gib={self.cache_gib} must be above 0, or none for no limit")

    def check_batch_size(self, batch_size: int) -> None:
        """Refuse, as a `ConfigError`, a batch that does not divide into the virtual shards."""
        shards = self.virtual_shards
        if batch_size < 1 or batch_size % shards:
            raise ConfigError(
                f"batch_size={batch_size} does not divide into {shards} virtual shards: use a "
                f"multiple of {shards}, or set virtual_shards"
            )

    def storage(self) -> Storage:
        """What opens this data's files."""
        return Storage(self.cache_dir, self.storage_options, self.cache_gib)
