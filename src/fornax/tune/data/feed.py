"""The order of examples: which ones make each batch, on which host, from an exact position.

Legend: B examples of a global batch, N examples, V virtual shards. Host h of H has the examples
h B/H to (h + 1) B/H of every global batch, whatever H is.
"""

import math
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fornax.config.errors import ConfigError, DataError
from fornax.data.order import Order

__all__ = ["Feed", "IndexStream", "Picks", "fingerprint"]


@dataclass(frozen=True, kw_only=True)
class Feed:
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
    """Streams that the examples are dealt to, fixed for the life of a run; a multiple of the hosts.
    None: the first of 8, 4, 2 and 1 that divides the batch."""
    host_index: int = 0
    """This host."""
    host_count: int = 1
    """Hosts that share each batch."""

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
        if shards % self.host_count or not 0 <= self.host_index < self.host_count:
            raise ConfigError(
                f"virtual_shards={shards} do not divide over {self.host_count} hosts (this is "
                f"host {self.host_index}); use a batch size and virtual_shards that are multiples "
                "of the hosts"
            )

    @property
    def shards(self) -> int:
        """Virtual shards, V."""
        if self.virtual_shards is not None:
            return self.virtual_shards
        return next(count for count in (8, 4, 2, 1) if self.batch_size % count == 0)


class Picks(NamedTuple):
    """The examples of one global batch: int64 `[B]`, -1 where the last epoch has ended."""

    index: np.ndarray
    """Which example."""
    epoch: np.ndarray
    """In which pass over them, from 0."""


class IndexStream(Iterator[Picks]):
    """The picks of global batches, the same on every host; `mine` is this host's part of them.

    Args:
      count: examples, N.
      feed: how they are dealt.
      identity: what else a saved position depends on, plain JSON by name; a position with another
        is refused.

    Raises:
      DataError: when there are no examples.
    """

    def __init__(self, count: int, feed: Feed, identity: dict[str, Any] | None = None):
        if count < 1:
            raise DataError("there are no examples; name a file that has some")
        self.feed = feed
        self.count = count
        self.batch = 0
        self._order = Order(
            ["main"],
            [count],
            [1.0],
            shards=1,
            seed=feed.seed,
            shuffle=feed.shuffle,
            epochs=feed.epochs,
        )
        self._identity = {
            "virtual_shards": feed.shards,
            "batch_size": feed.batch_size,
            "seed": feed.seed,
            "shuffle": feed.shuffle,
            "examples": count,
            **(identity or {}),
        }

    @property
    def mine(self) -> slice:
        """This host's part of a global batch."""
        rows = self.feed.batch_size // self.feed.host_count
        return slice(self.feed.host_index * rows, (self.feed.host_index + 1) * rows)

    def batches_per_epoch(self) -> int:
        """Batches that one pass over the examples takes, the last one perhaps not full."""
        return self.batches_in(1)

    def batches_in(self, epochs: float) -> int:
        """Batches until every example was given `epochs` times, the last one perhaps not full."""
        return math.ceil(self.count * epochs / self.feed.batch_size)

    def total_batches(self) -> int | None:
        """Batches of all epochs; None without end."""
        if self.feed.epochs is None:
            return None
        return self.batches_in(self.feed.epochs)

    def __iter__(self) -> "IndexStream":
        return self

    def __next__(self) -> Picks:
        total = self.total_batches()
        if total is not None and self.batch >= total:
            raise StopIteration
        size = self.feed.batch_size
        places = self._order.places(0, self.batch * size, size)
        self.batch += 1
        past = places.part < 0
        return Picks(np.where(past, -1, places.index), np.where(past, -1, places.epoch))

    def state(self) -> dict[int, dict[str, Any]]:
        """The position after the last batch given, for each of this host's virtual shards."""
        block = self.feed.shards // self.feed.host_count
        first = self.feed.host_index * block
        return {
            shard: {"batch": self.batch, **self._identity} for shard in range(first, first + block)
        }

    def restore(self, state: dict[int, dict[str, Any]], *, allow_changes: bool = False) -> None:
        """Go to a position.

        Args:
          state: the parts of any host, from `state()`.
          allow_changes: go on after as many examples although they or their order differ.

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
        given = int(saved["batch"]) * int(saved.get("batch_size", self.feed.batch_size))
        self.batch = given // self.feed.batch_size

    def close(self) -> None:
        """Nothing is read ahead."""


def fingerprint(arrays: Iterable[np.ndarray]) -> str:
    """A text that changes when one of the arrays does."""
    code = 0
    for array in arrays:
        code = zlib.crc32(str((array.dtype.str, array.shape)).encode(), code)
        code = zlib.crc32(np.ascontiguousarray(array).tobytes(), code)
    return f"{code:08x}"
