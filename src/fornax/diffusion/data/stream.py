"""Batches of examples, each of one bucket, in an order that any number of hosts sees alike.

An epoch is a permutation of all examples. They are taken in its order into the queue of their
bucket, and a queue that holds a batch gives one; what is left when an epoch ends stays for the
next. Legend: B examples of a global batch, R rows of this host.
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fornax.config.errors import DataError
from fornax.data import Hosts
from fornax.data.order import Order

__all__ = ["BucketStream", "Picks"]

Position = dict[int, dict]

_BLOCK = 256
"""Positions whose examples are looked up at once."""


class Picks(NamedTuple):
    """This host's part of a global batch."""

    number: int
    """Of the batch, from 0."""
    bucket: int
    index: NDArray[np.int64]
    """(R,) examples; -1 in rows of padding."""
    epoch: NDArray[np.int64]
    """(R,) in which pass over the examples, from 0."""
    place: NDArray[np.int64]
    """(R,) rows of the global batch."""


Collate = Callable[[Picks, Callable[..., Iterable[Any]]], dict[str, np.ndarray]]


class BucketStream(Iterator[dict[str, np.ndarray]]):
    """A stream as `train.task.Batches` asks for; the next batch is made while one is trained on.

    Args:
      bucket: (N,) bucket of each example.
      collate: makes the rows of picks; called in a thread, with a `map` over `threads` others.
      batch_size: B.
      seed: of the order.
      endless: whether epochs follow each other, shuffled; else one pass in order, whose last
        batches are filled up with padding.
      hosts: which rows are this host's.
      identity: what a saved position depends on.
      threads: for `collate`.
    """

    def __init__(
        self,
        bucket: NDArray[np.int64],
        collate: Collate,
        *,
        batch_size: int,
        seed: int,
        endless: bool,
        hosts: Hosts,
        identity: str,
        threads: int = 1,
    ):
        self._bucket, self._collate = bucket, collate
        self._batch_size, self._hosts, self._endless = batch_size, hosts, endless
        self._identity = {
            "examples": identity,
            "batch_size": batch_size,
            "seed": seed,
            "count": len(bucket),
        }
        self._order = Order(
            ["main"],
            [len(bucket)],
            [1.0],
            shards=1,
            seed=seed,
            shuffle=endless,
            epochs=None if endless else 1,
        )
        self._block = -1
        self._places: tuple[list[int], list[int]] = ([], [])
        self._pool = ThreadPoolExecutor(threads + 1, thread_name_prefix="images")
        self._ahead: Future[dict[str, np.ndarray]] | None = None
        self._go_to(0, 0, {})

    def _go_to(self, number: int, taken: int, queues: dict[int, list[int]]) -> None:
        self._number, self._taken = number, taken
        self._queues = {bucket: list(queue) for bucket, queue in queues.items()}
        self._given = self._here()
        self._ahead = None

    def _here(self) -> dict:
        """The position before the next picks, JSON."""
        queues = {str(b): list(queue) for b, queue in sorted(self._queues.items()) if queue}
        return {"number": self._number, "taken": self._taken, "queues": queues, **self._identity}

    def _pick(self) -> Picks | None:
        """The next batch's examples; None at the end."""
        draws = self._full()
        if draws is None:
            return None
        rows = self._hosts.rows(self._batch_size)
        size = self._hosts.size(self._batch_size)
        mine = np.full(size, -1, np.int64)
        part = draws[rows.start : rows.stop]
        mine[: len(part)] = part
        there = mine >= 0
        count = len(self._bucket)
        found = Picks(
            number=self._number,
            bucket=int(self._bucket[draws[0] % count]),
            index=np.where(there, mine % count, -1),
            epoch=np.where(there, mine // count, 0),
            place=np.arange(size) + self._hosts.index * size,
        )
        self._number += 1
        return found

    def _full(self) -> NDArray[np.int64] | None:
        """Draws (epoch * N + example) of a queue that is full, or of one that is left."""
        size, count = self._batch_size, len(self._bucket)
        while True:
            index, epoch = self._drawn(self._taken)
            if index < 0:
                break
            self._taken += 1
            queue = self._queues.setdefault(int(self._bucket[index]), [])
            queue.append(epoch * count + index)
            if len(queue) == size:
                self._queues[int(self._bucket[index])] = []
                return np.asarray(queue)
        left = next((b for b, queue in sorted(self._queues.items()) if queue), None)
        return None if left is None else np.asarray(self._queues.pop(left))

    def _drawn(self, position: int) -> tuple[int, int]:
        """Example and epoch at a position of the endless order; -1 past the end."""
        block, offset = divmod(position, _BLOCK)
        if block != self._block:
            places = self._order.places(0, block * _BLOCK, _BLOCK)
            index = np.where(places.part < 0, -1, places.index)
            self._block, self._places = block, (index.tolist(), places.epoch.tolist())
        return self._places[0][offset], self._places[1][offset]

    def _make(self) -> "Future[dict[str, np.ndarray]] | None":
        picks = self._pick()
        return None if picks is None else self._pool.submit(self._collate, picks, self._pool.map)

    def __next__(self) -> dict[str, np.ndarray]:
        """This host's rows of the next global batch.

        Raises:
          DataError: from an image that cannot be decoded.
        """
        ready = self._make() if self._ahead is None else self._ahead
        if ready is None:
            raise StopIteration
        rows = ready.result()
        self._given = self._here()
        self._ahead = self._make()
        return rows

    def state(self) -> Position:
        """The position after the last batch given: one virtual shard, which all hosts read."""
        return {0: self._given}

    def restore(self, state: Position, *, allow_changes: bool = False) -> None:
        """Go to a position.

        Args:
          state: the parts of any host.
          allow_changes: continue after as many batches although examples or order differ; what was
            queued is dropped.

        Raises:
          DataError: no position, or one of other examples.
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
                f"the images differ from those of the saved position ({'; '.join(changes)}): "
                "restore files and configuration, or accept the change with --accept-changes data"
            )
        queues = {} if changes else {int(b): queue for b, queue in saved["queues"].items()}
        self._go_to(int(saved["number"]), int(saved["taken"]), queues)

    def close(self) -> None:
        """Stop reading ahead."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def describe(self) -> dict[str, object]:
        """What the data is, JSON-able."""
        sizes = np.bincount(self._bucket)
        return {"examples": len(self._bucket), "buckets": [int(n) for n in sizes]}
