"""Batches of preference pairs, with further columns beside them.

Legend: P pairs of this host, 2 sequences of each, T tokens of a sequence.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fornax.config.errors import ConfigError
from fornax.tune.data.encoded import Encoded
from fornax.tune.data.feed import Feed, Picks, fingerprint
from fornax.tune.data.load import Loaded, PairTokens
from fornax.tune.data.rows import Batch, RowStream, buckets_up_to, pad_rows

__all__ = ["Columns", "preference_batches"]

Columns = Mapping[str, np.ndarray]
"""Further arrays by name, each with a first dimension of examples."""


def preference_batches(
    loaded: Loaded[PairTokens],
    feed: Feed,
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

    def collate(picks: Picks, mine: slice, length: int) -> Batch:
        index = picks.index[mine]
        both = [_two(None if i < 0 else pairs[i]) for i in index.tolist()]
        return _rows(both, index, length) | _gathered(extra, index)

    lengths = [max(pair.chosen.length, pair.rejected.length) for pair in pairs]
    return RowStream(
        lengths,
        collate,
        feed,
        buckets or buckets_up_to(max_length),
        _identity(s for pair in pairs for s in (pair.chosen, pair.rejected)),
    )


def _two(pair: PairTokens | None) -> tuple[Encoded | None, Encoded | None]:
    return (None, None) if pair is None else (pair.chosen, pair.rejected)


def _rows(both: Sequence[tuple[Any, Any]], index: np.ndarray, length: int) -> Batch:
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


def _identity(sequences: Any) -> dict[str, str]:
    arrays = (array for s in sequences for array in (s.tokens, s.mask))
    return {"tokens": fingerprint(arrays)}
