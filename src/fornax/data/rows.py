"""Which rows of a batch a host holds, and rows of segments to arrays.

Shapes: B rows of the global batch, P rows of the array that holds it, T tokens of a row.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fornax.config.errors import DataError
from fornax.data.packing import Row

Batch = dict[str, np.ndarray]
"""tokens, targets, segment_ids, positions int32 `[B, T]`; loss_weights float32 `[B, T]`."""


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """Which rows of every global batch one host holds; the batch is the same for any number.

    A batch of B rows lies at the start of an array of P rows: B rounded up so that every host, and
    every device of it, has the same number. The rows from B to P are padding: no segments, no
    weight. Host `index` holds the rows P / `count` * `index` and on.

    Raises:
      DataError: when there is no such host.
    """

    index: int = 0
    """This host."""
    count: int = 1
    """Hosts that hold different rows."""
    multiple: int = 1
    """P is a multiple of it, and of `count`: the devices that share rows, times micro-batches."""

    def __post_init__(self) -> None:
        if self.count < 1 or self.multiple < 1 or not 0 <= self.index < self.count:
            raise DataError(
                f"host {self.index} of {self.count} (rows in multiples of {self.multiple}): a host "
                "is numbered from 0 below their count, and counts are 1 or more"
            )

    def padded(self, batch_size: int) -> int:
        """P: rows of the array that holds a batch of `batch_size`, of all hosts together."""
        unit = math.lcm(self.count, self.multiple)
        return -(-batch_size // unit) * unit

    def size(self, batch_size: int) -> int:
        """Rows of this host's arrays, padding included: the same on every host."""
        return self.padded(batch_size) // self.count

    def rows(self, batch_size: int) -> range:
        """Rows of the batch that this host holds, none past its end."""
        size = self.size(batch_size)
        start, stop = self.index * size, (self.index + 1) * size
        return range(min(start, batch_size), min(stop, batch_size))


def fill(rows: Sequence[Row], seq_len: int) -> Batch:
    """Copy planned rows into arrays.

    A target is the next token of the same document, also across the end of a row. Where there is
    none (a document's last token, padding) target and loss weight are 0. Segment ids count from 1
    in each row; positions restart at 0 with each segment.
    """
    size = len(rows) * seq_len
    padding = np.zeros(seq_len, np.uint16)
    pieces: list[np.ndarray] = []
    lengths: list[int] = []
    starts: list[int] = []
    numbers: list[int] = []
    following: list[int] = []
    cursor = 0
    for row_number, row in enumerate(rows):
        for number, (tokens, start, length) in enumerate(row, 1):
            end = start + length
            pieces.append(tokens[start:end])
            starts.append(cursor)
            lengths.append(length)
            numbers.append(number)
            following.append(int(tokens[end]) if end < len(tokens) else -1)
            cursor += length
        gap = (row_number + 1) * seq_len - cursor
        if gap:
            pieces.append(padding[:gap])
            starts.append(cursor)
            lengths.append(gap)
            numbers.append(0)
            following.append(-1)
            cursor += gap
    tokens_ = np.empty(size, np.int32)
    if pieces:
        np.concatenate(pieces, out=tokens_, casting="unsafe")
    return _arrays(
        tokens_,
        np.asarray(starts, np.int32),
        np.asarray(lengths, np.int64),
        np.asarray(numbers, np.int32),
        np.asarray(following, np.int32),
        (len(rows), seq_len),
    )


def _arrays(
    tokens: np.ndarray,
    starts: np.ndarray,
    lengths: np.ndarray,
    numbers: np.ndarray,
    following: np.ndarray,
    shape: tuple[int, int],
) -> Batch:
    """The five arrays, from flat tokens and each piece's start, length, number and next token."""
    segment_ids = np.repeat(numbers, lengths)
    positions = np.arange(len(tokens), dtype=np.int32) - np.repeat(starts, lengths)
    positions[segment_ids == 0] = 0
    targets = np.empty_like(tokens)
    targets[:-1] = tokens[1:]
    ends = starts + lengths - 1
    targets[ends] = np.maximum(following, 0)
    weights = (segment_ids > 0).astype(np.float32)
    weights[ends[following < 0]] = 0.0
    flat = {
        "tokens": tokens,
        "targets": targets,
        "loss_weights": weights,
        "segment_ids": segment_ids,
        "positions": positions,
    }
    return {name: array.reshape(shape) for name, array in flat.items()}
