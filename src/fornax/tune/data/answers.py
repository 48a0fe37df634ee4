"""Batches of preference pairs, and of labelled completions with the baseline that KTO needs.

Legend: P pairs or B completions of this host, 2 sequences of each, T tokens of a sequence.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fornax.config.errors import ConfigError
from fornax.tune.data.encoded import Encoded, cut_end, encoded
from fornax.tune.data.feed import Feed, Picks, fingerprint
from fornax.tune.data.load import LabelledTokens, Loaded, PairTokens
from fornax.tune.data.rows import Batch, RowStream, buckets_up_to, pad_rows

__all__ = ["Columns", "kto_batches", "preference_batches"]

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


def kto_batches(
    loaded: Loaded[LabelledTokens],
    feed: Feed,
    max_length: int,
    *,
    columns: Columns | None = None,
    buckets: Sequence[int] | None = None,
) -> RowStream:
    """Batches of labelled completions, each beside a prompt with a completion not its own.

    The second sequence is the prompt followed by the completion of the next row of the global
    batch (of the first, for the last); its log-probabilities estimate the divergence from the
    reference that KTO subtracts (Ethayarajh et al. 2024, arXiv:2402.01306). It is cut at
    `max_length`.

    Returns:
      A stream of `tokens`, `targets`, `segment_ids`, `positions` int32 and `loss_weights` float32
      `[B, 2, T]`; `desirable` float32 `[B]`, 1 or 0; `example` int32 `[B]`, -1 in rows of padding;
      and `columns`.

    Raises:
      ConfigError: for a batch of one, which has no other completion; for a column of another
        length than the data, or with a name that is taken.
    """
    if feed.batch_size < 2:
        raise ConfigError(
            "batch_size=1 leaves KTO no other completion to estimate the divergence with; use 2 or "
            "more"
        )
    items = loaded.items
    extra = _checked(columns, len(items))
    extra["desirable"] = np.asarray([item.label for item in items], np.float32)

    def collate(picks: Picks, mine: slice, length: int) -> Batch:
        real = picks.index[picks.index >= 0]
        following = np.concatenate([np.roll(real, -1), picks.index[len(real) :]])
        both = [
            (None, None) if own < 0 else (items[own].sequence, _swapped(items, own, other, length))
            for own, other in zip(picks.index[mine].tolist(), following[mine].tolist(), strict=True)
        ]
        return _rows(both, picks.index[mine], length) | _gathered(extra, picks.index[mine])

    lengths = [item.sequence.length for item in items]
    return RowStream(
        lengths,
        collate,
        feed,
        buckets or buckets_up_to(max_length),
        _identity(item.sequence for item in items),
    )


def _swapped(items: Sequence[LabelledTokens], own: int, other: int, length: int) -> Encoded:
    """The prompt of one item with the completion of another."""
    prompt, answer = items[own].sequence, items[other].sequence
    tokens = np.concatenate([prompt.tokens[: prompt.prompt], answer.tokens[answer.prompt :]])
    mask = np.concatenate([np.zeros(prompt.prompt, bool), answer.mask[answer.prompt :]])
    return cut_end(encoded(tokens, mask), length)


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
        if name in (*taken, "desirable"):
            raise ConfigError(f"the column name {name} is taken; use another")
        if len(column) != count:
            raise ConfigError(f"the column {name} has {len(column)} rows for {count} examples")
    return dict(columns or {})


def _identity(sequences: Any) -> dict[str, str]:
    arrays = (array for s in sequences for array in (s.tokens, s.mask))
    return {"tokens": fingerprint(arrays)}
