"""Batches of supervised fine-tuning: packed through `fornax.data`'s batches, or padded rows.

Legend: R rows of this host, T tokens of a row.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np

from fornax.data import Batches, BestFit, DataConfig, Prefetch
from fornax.data.batches import count_batches
from fornax.data.order import Order
from fornax.data.pipeline import Pipeline
from fornax.data.records import Record
from fornax.data.stream import PartReader
from fornax.data.transforms import Chain
from fornax.mesh.hosts import most
from fornax.tune.data.encoded import Encoded
from fornax.tune.data.feed import Feed, Picks, fingerprint
from fornax.tune.data.load import Loaded
from fornax.tune.data.rows import Batch, RowStream, buckets_up_to, pad_rows

__all__ = ["PackedStream", "sft_batches"]

_LEARNED = np.int32(1 << 30)
"""Added to a token that is learned, so that its mask travels with it through the packing."""
_MOST_BINS = 64


def sft_batches(
    loaded: Loaded[Encoded],
    feed: Feed,
    max_length: int,
    *,
    packing: Literal["best_fit", "none"] = "best_fit",
    buckets: Sequence[int] | None = None,
) -> "PackedStream | RowStream":
    """Batches of `tokens`, `targets`, `segment_ids`, `positions` int32 and `loss_weights` float32.

    Args:
      loaded: examples of at most `max_length` tokens.
      feed: order and hosts; its `batch_size` counts rows.
      max_length: tokens of a packed row.
      packing: `best_fit` puts whole examples together in rows `[R, max_length]`, each a segment of
        its own that sees nothing of the others; `none` gives each example a row, padded to the
        first of `buckets` that holds the whole batch.
      buckets: lengths of padded rows; None: powers of two up to `max_length`.
    """
    if packing == "best_fit":
        return PackedStream(loaded.items, feed, max_length)

    def collate(picks: Picks, mine: slice, length: int) -> Batch:
        chosen = [None if i < 0 else loaded.items[i] for i in picks.index[mine].tolist()]
        return pad_rows(chosen, length)

    lengths = [item.length for item in loaded.items]
    identity = {"tokens": _identity(loaded.items)}
    return RowStream(lengths, collate, feed, buckets or buckets_up_to(max_length), identity)


def _identity(items: Sequence[Encoded]) -> str:
    return fingerprint(array for item in items for array in (item.tokens, item.mask))


class _Flagged:
    """Encoded examples as a source of `fornax.data`: learned tokens carry a flag."""

    def __init__(self, items: Sequence[Encoded]):
        self._items = items
        self._identity = _identity(items)

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

    def __init__(self, items: Sequence[Encoded], feed: Feed, max_length: int):
        self._config = DataConfig(
            packing=BestFit(bins=_bins(items, max_length, feed.shards)),
            shuffle=feed.shuffle,
            seed=feed.seed,
            epochs=feed.epochs,
            virtual_shards=feed.shards,
            prefetch=Prefetch(buffer=4),
        )
        self._part = PartReader("main", _Flagged(items), None, Chain(()), ())
        self._rows = feed.batch_size
        self._max_length = max_length
        self._batches = Batches(
            self._pipeline(feed.epochs), feed.host_index, feed.host_count, agree=most
        )

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

    def __iter__(self) -> "PackedStream":
        return self

    def __next__(self) -> Batch:
        batch = next(self._batches)
        learned = (batch["targets"] & _LEARNED) != 0
        return {
            **batch,
            "tokens": batch["tokens"] & ~_LEARNED,
            "targets": batch["targets"] & ~_LEARNED,
            "loss_weights": learned.astype(np.float32),
        }

    def state(self) -> dict[int, dict[str, Any]]:
        """The position after the last batch given, of this host's virtual shards."""
        return self._batches.state()

    def restore(self, state: dict[int, dict[str, Any]], *, allow_changes: bool = False) -> None:
        """Continue from the states of all hosts; see `fornax.data.Batches.restore`."""
        self._batches.restore(state, allow_changes=allow_changes)

    def close(self) -> None:
        """Stop reading ahead."""
        self._batches.close()
