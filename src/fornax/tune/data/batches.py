"""Batches of token sequences: which examples, in what order, on which host; rows of few lengths.

Legend: B examples of a global batch, N examples, V virtual shards, R rows of this host, T tokens of
a row. Each host has a block of every global batch (`fornax.data.Hosts`), whatever their number;
what a block lacks at the batch's end is rows of padding.
"""

import itertools
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fornax.config.errors import ConfigError, DataError
from fornax.data.order import Order
from fornax.data.packing import Segment
from fornax.data.rows import Hosts, fill
from fornax.tune.data.encoded import Encoded
from fornax.tune.data.records import JsonObject

if TYPE_CHECKING:
    from fornax.train.task import Batches

__all__ = [
    "Batch",
    "BatchIndex",
    "ExtendedStream",
    "IndexStream",
    "LoaderOptions",
    "RowStream",
    "bucket",
    "buckets_up_to",
    "fingerprint",
    "pad_rows",
]


Batch = dict[str, np.ndarray]

Position = dict[int, JsonObject]
"""Of a stream: a part for each virtual shard of this host, JSON."""


@dataclass(frozen=True, kw_only=True)
class LoaderOptions:
    """How examples are dealt into batches, and this host's part of each."""

    batch_size: int
    """Examples (rows, pairs) of a global batch."""
    seed: int = 0
    """Seed of the order."""
    shuffle: bool = True
    """A new order of all examples in every epoch."""
    epochs: int | None = None
    """Passes over the examples; None: without end."""
    virtual_shards: int | None = None
    """Streams that the examples are dealt to, fixed for the life of a run; it divides the batch.
    None: the first of 8, 4, 2 and 1 that divides the batch."""
    hosts: Hosts = field(default_factory=Hosts)
    """Which rows of each batch this host holds."""

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ConfigError(f"batch_size={self.batch_size} must be at least 1")
        if self.epochs is not None and self.epochs < 1:
            raise ConfigError(f"epochs={self.epochs} must be at least 1, or none for no end")
        shards = self.shards
        if shards < 1 or self.batch_size % shards:
            raise ConfigError(
                f"batch_size={self.batch_size} does not divide into {shards} virtual shards; use "
                f"a multiple of {max(shards, 1)}, or set virtual_shards"
            )

    @property
    def shards(self) -> int:
        """Virtual shards, V."""
        if self.virtual_shards is not None:
            return self.virtual_shards
        return next(count for count in (8, 4, 2, 1) if self.batch_size % count == 0)


class BatchIndex(NamedTuple):
    """The examples of one global batch: int64 `[B]`, -1 where the last epoch has ended."""

    index: np.ndarray
    """Which example."""
    epoch: np.ndarray
    """In which pass over them, from 0."""


class IndexStream(Iterator[BatchIndex]):
    """The picks of global batches, the same on every host; `mine` takes this host's part of them.

    Args:
      count: examples, N.
      options: how they are dealt.
      identity: what else a saved position depends on, plain JSON by name; a position with another
        is refused.

    Raises:
      DataError: when there are no examples.
    """

    def __init__(self, count: int, options: LoaderOptions, identity: JsonObject | None = None):
        if count < 1:
            raise DataError("there are no examples; name a file that has some")
        self.options = options
        self.count = count
        self.batch = 0
        self._order = Order(
            ["main"],
            [count],
            [1.0],
            shards=1,
            seed=options.seed,
            shuffle=options.shuffle,
            epochs=options.epochs,
        )
        self._identity = {
            "virtual_shards": options.shards,
            "batch_size": options.batch_size,
            "seed": options.seed,
            "shuffle": options.shuffle,
            "examples": count,
            **(identity or {}),
        }

    def mine(self, picks: BatchIndex) -> np.ndarray:
        """This host's examples of a global batch: int64 `[R]`, -1 in rows of padding."""
        options = self.options
        found = np.full(options.hosts.size(options.batch_size), -1, np.int64)
        rows = options.hosts.rows(options.batch_size)
        found[: len(rows)] = picks.index[rows.start : rows.stop]
        return found

    def batches_per_epoch(self) -> int:
        """Batches that one pass over the examples takes, the last one perhaps not full."""
        return self.batches_in(1)

    def batches_in(self, epochs: float) -> int:
        """Batches until every example was given `epochs` times, the last one perhaps not full."""
        return math.ceil(self.count * epochs / self.options.batch_size)

    def total_batches(self) -> int | None:
        """Batches of all epochs; None without end."""
        if self.options.epochs is None:
            return None
        return self.batches_in(self.options.epochs)

    def __next__(self) -> BatchIndex:
        total = self.total_batches()
        if total is not None and self.batch >= total:
            raise StopIteration
        size = self.options.batch_size
        places = self._order.places(0, self.batch * size, size)
        self.batch += 1
        past = places.part < 0
        return BatchIndex(np.where(past, -1, places.index), np.where(past, -1, places.epoch))

    def state(self) -> Position:
        """The position after the last batch given, for each virtual shard this host has rows of."""
        rows = self.options.hosts.rows(self.options.batch_size)
        each = self.options.batch_size // self.options.shards
        return {row // each: {"batch": self.batch, **self._identity} for row in rows}

    def restore(self, state: Position, *, allow_changes: bool = False) -> None:
        """Go to a position.

        Args:
          state: the parts of any host, from `state()`.
          allow_changes: continue after as many examples although they or their order differ.

        Raises:
          DataError: for an empty position, or one of other data.
        """
        if not state:
            raise DataError("the saved data position is empty: there is nothing to restore")
        saved = next(iter(state.values()))
        changes = [
            f"{name} was {saved.get(name)} and is {value}"
            for name, value in self._identity.items()
            if saved.get(name) != value
        ]
        if changes and not allow_changes:
            raise DataError(
                f"the data differs from that of the saved position ({'; '.join(changes)}): restore "
                "the files and the configuration, or accept the change"
            )
        given = int(saved["batch"]) * int(saved.get("batch_size", self.options.batch_size))
        self.batch = given // self.options.batch_size

    def close(self) -> None:
        """Nothing is read ahead."""


def fingerprint(arrays: Iterable[np.ndarray]) -> str:
    """A text that changes when one of the arrays does."""
    code = 0
    for array in arrays:
        code = zlib.crc32(str((array.dtype.str, array.shape)).encode(), code)
        code = zlib.crc32(np.ascontiguousarray(array).tobytes(), code)
    return f"{code:08x}"


Collate = Callable[[np.ndarray, int], Batch]
"""(this host's examples of the batch, int64 `[R]`, -1 for padding; T) to its rows."""

_SMALLEST = 64


def buckets_up_to(max_length: int, smallest: int = _SMALLEST) -> tuple[int, ...]:
    """Lengths that rows are padded to: powers of two times `smallest`, and `max_length`.

    Rows are padded to less than twice their length, in few shapes: each is compiled once.
    """
    sizes = itertools.takewhile(lambda size: size < max_length, _doubled(smallest))
    return (*sizes, max_length)


def _doubled(size: int) -> Iterator[int]:
    while True:
        yield size
        size *= 2


def bucket(length: int, buckets: Sequence[int]) -> int:
    """The first of the ascending `buckets` that holds `length`.

    Raises:
      ConfigError: when none does.
    """
    found = next((size for size in buckets if size >= length), None)
    if found is None:
        raise ConfigError(f"{length} tokens fit into none of the lengths {tuple(buckets)}")
    return found


def pad_rows(sequences: Sequence[Encoded | None], length: int) -> Batch:
    """Sequences as rows of `length` tokens; None is a row of padding.

    Returns:
      `tokens`, `targets`, `segment_ids` (1, padding 0), `positions` int32 and `loss_weights`
      float32, each `[R, T]`. A weight stands where the target is learned.
    """
    rows = [[] if item is None else [Segment(item.tokens, 0, item.length)] for item in sequences]
    batch = fill(rows, length)
    batch["loss_weights"] = np.zeros((len(rows), length), np.float32)
    for weights, item in zip(batch["loss_weights"], sequences, strict=True):
        if item is not None:
            weights[: item.length - 1] = item.mask[1:]
    return batch


class RowStream(Iterator[Batch]):
    """Batches of rows that `collate` makes of picks, as `train.task.Batches`.

    All hosts give a batch the same T: the bucket of the longest example of the global batch.

    Args:
      lengths: tokens of each example (of several sequences the longest).
      collate: makes this host's rows.
      options: order and hosts.
      buckets: lengths that rows are padded to, ascending.
      identity: what else a saved position depends on, plain JSON by name.
    """

    def __init__(
        self,
        lengths: Sequence[int] | np.ndarray,
        collate: Collate,
        options: LoaderOptions,
        buckets: Sequence[int],
        identity: JsonObject | None = None,
    ):
        self._lengths = np.asarray(lengths, np.int64)
        self._collate = collate
        self._buckets = tuple(buckets)
        self._picks = IndexStream(len(self._lengths), options, identity)
        bucket(int(self._lengths.max()), self._buckets)

    def batches_per_epoch(self) -> int:
        """Batches that one pass over the examples takes, the last one perhaps not full."""
        return self.batches_in(1)

    def batches_in(self, epochs: float) -> int:
        """Batches until every example was given `epochs` times."""
        return self._picks.batches_in(epochs)

    def __next__(self) -> Batch:
        picks = next(self._picks)
        longest = int(self._lengths[picks.index[picks.index >= 0]].max())
        return self._collate(self._picks.mine(picks), bucket(longest, self._buckets))

    def state(self) -> Position:
        return self._picks.state()

    def restore(self, state: Position, *, allow_changes: bool = False) -> None:
        self._picks.restore(state, allow_changes=allow_changes)

    def close(self) -> None:
        """Nothing is read ahead."""


class ExtendedStream(Iterator[Batch]):
    """A stream whose rows get further arrays, as `train.task.Batches`.

    Args:
      inner: the stream; its position is this one's.
      extend: rows to what is added to them.
    """

    def __init__(self, inner: "Batches", extend: Callable[[Batch], Mapping[str, Any]]):
        self._inner = inner
        self._extend = extend

    def __next__(self) -> Batch:
        rows = next(self._inner)
        return {**rows, **self._extend(rows)}

    def state(self) -> Position:
        return self._inner.state()

    def restore(self, state: Position, *, allow_changes: bool = False) -> None:
        self._inner.restore(state, allow_changes=allow_changes)

    def close(self) -> None:
        self._inner.close()
