"""Streams of batches for each kind of data: packed or padded examples, and preference pairs.

Legend: R rows or P pairs of this host, 2 sequences of a pair, T tokens of a row.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

import numpy as np

from fornax.config.errors import ConfigError
from fornax.data import Batches, BestFit, DataConfig, Prefetch
from fornax.data.batches import count_batches
from fornax.data.order import Order
from fornax.data.pipeline import Pipeline
from fornax.data.records import Record
from fornax.data.stream import PartReader
from fornax.data.transforms import Chain
from fornax.mesh.hosts import most
from fornax.tune.data.batches import (
    Batch,
    LoaderOptions,
    Position,
    RowStream,
    buckets_up_to,
    fingerprint,
    pad_rows,
)
from fornax.tune.data.encoded import Encoded
from fornax.tune.data.load import Loaded, PairTokens

__all__ = ["PackedStream", "preference_batches", "sft_batches"]


_LEARNED = np.int32(1 << 30)
"""Added to a token that is learned, so that its mask travels with it through the packing."""
_MOST_BINS = 64


def sft_batches(
    loaded: Loaded[Encoded],
    options: LoaderOptions,
    max_length: int,
    *,
    packing: Literal["best_fit", "none"] = "best_fit",
    buckets: Sequence[int] | None = None,
) -> "PackedStream | RowStream":
    """Batches of `tokens`, `targets`, `segment_ids`, `positions` int32 and `loss_weights` float32.

    Args:
      loaded: examples of at most `max_length` tokens.
      options: order and hosts; its `batch_size` counts rows.
      max_length: tokens of a packed row.
      packing: `best_fit` puts whole examples together in rows `[R, max_length]`, each a segment of
        its own that sees nothing of the others; `none` gives each example a row, padded to the
        first of `buckets` that holds the whole batch.
      buckets: lengths of padded rows; None: powers of two up to `max_length`.
    """
    if packing == "best_fit":
        return PackedStream(loaded.items, options, max_length)

    def collate(index: np.ndarray, length: int) -> Batch:
        chosen = [None if i < 0 else loaded.items[i] for i in index.tolist()]
        return pad_rows(chosen, length)

    lengths = [item.length for item in loaded.items]
    identity = {"tokens": _fingerprint(loaded.items)}
    return RowStream(lengths, collate, options, buckets or buckets_up_to(max_length), identity)


def _fingerprint(items: Sequence[Encoded]) -> str:
    return fingerprint(array for item in items for array in (item.tokens, item.mask))


class _Flagged:
    """Encoded examples as a source of `fornax.data`: learned tokens carry a flag."""

    def __init__(self, items: Sequence[Encoded]):
        self._items = items
        self._identity = _fingerprint(items)

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Record:
        item = self._items[index]
        return {"tokens": item.tokens | np.where(item.mask, _LEARNED, np.int32(0))}

    def __getitems__(self, indices: Sequence[int]) -> list[Record]:
        return [self[index] for index in indices]

    def locate(self, index: int) -> str:
        return f"example {index}"

    def identity(self) -> str:
        return self._identity


def _bins(items: Sequence[Encoded], max_length: int, shards: int) -> int:
    """Rows that a shard fills at a time: at most what an epoch gives it, for those are shuffled
    among themselves, and epochs of a small set must not mix."""
    rows = sum(item.length for item in items) / max_length / shards
    return max(1, min(_MOST_BINS, int(rows)))


class PackedStream(Iterator[Batch]):
    """Packed rows `[R, max_length]`, as `train.task.Batches`: see `sft_batches`."""

    def __init__(self, items: Sequence[Encoded], options: LoaderOptions, max_length: int):
        self._config = DataConfig(
            packing=BestFit(bins=_bins(items, max_length, options.shards)),
            shuffle=options.shuffle,
            seed=options.seed,
            epochs=options.epochs,
            virtual_shards=options.shards,
            prefetch=Prefetch(buffer=4),
        )
        self._part = PartReader("main", _Flagged(items), None, Chain(()), ())
        self._rows = options.batch_size
        self._max_length = max_length
        self._batches = Batches(self._pipeline(options.epochs), options.hosts, agree=most)

    def _pipeline(self, epochs: int | None) -> Pipeline:
        order = Order(
            ["main"],
            [len(self._part)],
            [1.0],
            shards=self._config.virtual_shards,
            seed=self._config.seed,
            shuffle=self._config.shuffle,
            epochs=epochs,
        )
        return Pipeline(self._config, order, (self._part,), self._max_length, self._rows)

    def batches_per_epoch(self) -> int:
        """Batches that one pass over the examples takes, the last one perhaps not full."""
        return self.batches_in(1)

    def batches_in(self, epochs: float) -> int:
        """Batches until every example was given `epochs` times; packs them to count.

        Of an endless stream the last of them also hold examples of the next epoch.
        """
        whole = math.ceil(epochs)
        return math.ceil(count_batches(self._pipeline(whole)) * epochs / whole)

    def __next__(self) -> Batch:
        batch = next(self._batches)
        learned = (batch["targets"] & _LEARNED) != 0
        return {
            **batch,
            "tokens": batch["tokens"] & ~_LEARNED,
            "targets": batch["targets"] & ~_LEARNED,
            "loss_weights": learned.astype(np.float32),
        }

    def state(self) -> Position:
        """The position after the last batch given, of this host's virtual shards."""
        return self._batches.state()

    def restore(self, state: Position, *, allow_changes: bool = False) -> None:
        """Continue from the states of all hosts; see `fornax.data.Batches.restore`."""
        self._batches.restore(state, allow_changes=allow_changes)

    def close(self) -> None:
        self._batches.close()


Columns = Mapping[str, np.ndarray]
"""Further arrays by name, each with a first dimension of examples."""


def preference_batches(
    loaded: Loaded[PairTokens],
    options: LoaderOptions,
    max_length: int,
    *,
    columns: Columns | None = None,
    buckets: Sequence[int] | None = None,
) -> RowStream:
    """Batches of pairs, chosen first.

    Returns:
      A stream of `tokens`, `targets`, `segment_ids`, `positions` int32 and `loss_weights` float32
      `[P, 2, T]`; `example` int32 `[P]`, the place in `loaded`, -1 in rows of padding; `margin`
      float32 `[P]` where a pair has one (0 for those without); and `columns`, a row for each pair
      (zeros in padding).

    Raises:
      ConfigError: for a column of another length than the data, or with a name that is taken.
    """
    pairs = loaded.items
    extra = _checked(columns, len(pairs))
    if any(pair.margin is not None for pair in pairs):
        extra["margin"] = np.asarray([pair.margin or 0.0 for pair in pairs], np.float32)

    def collate(index: np.ndarray, length: int) -> Batch:
        both = [_two(None if i < 0 else pairs[i]) for i in index.tolist()]
        return _rows(both, index, length) | _gathered(extra, index)

    lengths = [max(pair.chosen.length, pair.rejected.length) for pair in pairs]
    return RowStream(
        lengths,
        collate,
        options,
        buckets or buckets_up_to(max_length),
        _identity(s for pair in pairs for s in (pair.chosen, pair.rejected)),
    )


_Two = tuple[Encoded | None, Encoded | None]


def _two(pair: PairTokens | None) -> _Two:
    return (None, None) if pair is None else (pair.chosen, pair.rejected)


def _rows(
    both: Sequence[tuple[Encoded | None, Encoded | None]], index: np.ndarray, length: int
) -> Batch:
    flat = pad_rows([sequence for two in both for sequence in two], length)
    batch = {name: array.reshape(len(both), 2, length) for name, array in flat.items()}
    return batch | {"example": index.astype(np.int32)}


def _gathered(columns: Columns, index: np.ndarray) -> Batch:
    """A row of each column for each example; zeros for padding."""
    padding = index < 0
    found = {name: column[np.maximum(index, 0)] for name, column in columns.items()}
    for rows in found.values():
        rows[padding] = 0
    return found


def _checked(columns: Columns | None, count: int) -> dict[str, np.ndarray]:
    taken = ("tokens", "targets", "segment_ids", "positions", "loss_weights", "example", "margin")
    for name, column in (columns or {}).items():
        if name in taken:
            raise ConfigError(f"the column name {name} is taken; use another")
        if len(column) != count:
            raise ConfigError(f"the column {name} has {len(column)} rows for {count} examples")
    return dict(columns or {})


def _identity(sequences: Iterable[Encoded]) -> dict[str, str]:
    arrays = (array for s in sequences for array in (s.tokens, s.mask))
    return {"tokens": fingerprint(arrays)}
