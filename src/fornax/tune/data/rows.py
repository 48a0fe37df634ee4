"""Rows of token sequences, padded to few lengths: streams of batches for a task.

Legend: R rows of this host, T tokens of a row.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from fornax.config.errors import ConfigError
from fornax.data.packing import Segment
from fornax.data.rows import fill
from fornax.tune.data.encoded import Encoded
from fornax.tune.data.feed import Feed, IndexStream, Picks

__all__ = ["Batch", "Collate", "RowStream", "bucket", "buckets_up_to", "pad_rows"]

Batch = dict[str, np.ndarray]

Collate = Callable[[Picks, slice, int], Batch]
"""(picks of the global batch, this host's part of them, T) to this host's rows."""

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
      feed: order and hosts.
      buckets: lengths that rows are padded to, ascending.
      identity: what else a saved position depends on, plain JSON by name.
    """

    def __init__(
        self,
        lengths: Sequence[int] | np.ndarray,
        collate: Collate,
        feed: Feed,
        buckets: Sequence[int],
        identity: dict[str, Any] | None = None,
    ):
        self._lengths = np.asarray(lengths, np.int64)
        self._collate = collate
        self._buckets = tuple(buckets)
        self._picks = IndexStream(len(self._lengths), feed, identity)
        bucket(int(self._lengths.max()), self._buckets)

    def batches_per_epoch(self) -> int:
        """Batches that one pass over the examples takes, the last one perhaps not full."""
        return self.batches_in(1)

    def batches_in(self, epochs: float) -> int:
        """Batches until every example was given `epochs` times."""
        return self._picks.batches_in(epochs)

    def __iter__(self) -> "RowStream":
        return self

    def __next__(self) -> Batch:
        picks = next(self._picks)
        longest = int(self._lengths[picks.index[picks.index >= 0]].max())
        return self._collate(picks, self._picks.mine, bucket(longest, self._buckets))

    def state(self) -> dict[int, dict[str, Any]]:
        """See `IndexStream.state`."""
        return self._picks.state()

    def restore(self, state: dict[int, dict[str, Any]], *, allow_changes: bool = False) -> None:
        """See `IndexStream.restore`."""
        self._picks.restore(state, allow_changes=allow_changes)

    def close(self) -> None:
        """Nothing is read ahead."""
