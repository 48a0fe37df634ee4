"""Rows for distillation: with what the teacher says of them, drawn by the student if asked for.

Legend: B rows of this host, T tokens of a row, E teacher width.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from fornax.config.errors import DataError
from fornax.tune.configs.distill import OnPolicy
from fornax.tune.data import (
    Encoded,
    Feed,
    Loaded,
    Picks,
    RowStream,
    bucket,
    buckets_up_to,
    pad_rows,
)
from fornax.tune.rollout import Sampler, SampleSettings, sample_seed

__all__ = ["Completed", "Drawn", "numbered_rows"]

Rows = dict[str, np.ndarray]


def numbered_rows(loaded: Loaded[Encoded], feed: Feed, max_length: int) -> RowStream:
    """A row for each example, padded, with its number `example` int32 [B] (-1 for padding)."""

    def collate(picks: Picks, mine: slice, length: int) -> Rows:
        index = picks.index[mine]
        chosen = [None if i < 0 else loaded.items[i] for i in index.tolist()]
        return pad_rows(chosen, length) | {"example": index.astype(np.int32)}

    lengths = [item.length for item in loaded.items]
    return RowStream(lengths, collate, feed, buckets_up_to(max_length))


class Completed:
    """A stream whose rows are completed by a function: what the teacher says of them."""

    def __init__(self, inner: Any, complete: Callable[[Rows], Mapping[str, Any]]):
        """Read from `inner`; `complete` gives what is added to its rows."""
        self._inner = inner
        self._complete = complete

    def __iter__(self) -> Iterator[Rows]:
        """The stream itself."""
        return self

    def __next__(self) -> Rows:
        """The next rows."""
        rows = next(self._inner)
        return {**rows, **self._complete(rows)}

    def state(self) -> dict[int, dict]:
        """The position."""
        return self._inner.state()

    def restore(self, state: dict[int, dict], *, allow_changes: bool = False) -> None:
        """Go to a position."""
        self._inner.restore(state, allow_changes=allow_changes)

    def close(self) -> None:
        """Stop reading ahead."""
        self._inner.close()


class Drawn:
    """A stream that in a share of the steps has the student answer the prompts of its rows.

    Which steps those are and what is drawn follow from the seed, the step and the weights: a run
    that goes on draws what it would have drawn.
    """

    def __init__(
        self,
        inner: RowStream,
        items: Sequence[Encoded],
        config: OnPolicy,
        *,
        max_length: int,
        seed: int,
        sampler: Callable[[], Sampler],
    ):
        """Read from `inner`, rows of `numbered_rows`.

        Args:
          inner: the data's rows.
          items: the examples that their numbers are of.
          config: share, length and temperature.
          max_length: tokens of a row at most.
          seed: of the run.
          sampler: gives a sampler of the student as it is now.

        Raises:
          DataError: when an example has no prompt to answer.
        """
        without = sum(item.prompt < 2 for item in items)
        if without:
            raise DataError(
                f"on_policy has the student answer prompts, and {without} of {len(items)} examples "
                "have none: give prompts with completions, or chats; plain text is for training "
                "without on_policy"
            )
        self._inner, self._items, self._config = inner, items, config
        self._max_length, self._seed, self._sampler = max_length, seed, sampler
        self._buckets = buckets_up_to(max_length)
        self.step = 0
        """Steps done before the next rows."""
        self.drawn = False
        """Whether the last rows were drawn."""

    def __iter__(self) -> Iterator[Rows]:
        """The stream itself."""
        return self

    def __next__(self) -> Rows:
        """The next rows: the data's, or the same prompts with the student's completions."""
        rows = next(self._inner)
        coin = np.random.default_rng([self._seed, self.step, 1]).random()
        self.drawn = bool(coin < self._config.share)
        return self._draw(rows) if self.drawn else rows

    def _draw(self, rows: Rows) -> Rows:
        config = self._config
        numbers = [int(n) for n in rows["example"]]
        prompts = [self._prompt(n) for n in numbers if n >= 0]
        settings = SampleSettings(max_tokens=config.max_tokens, temperature=config.temperature)
        seeds = [sample_seed(self._seed, self.step, place) for place in range(len(prompts))]
        groups = self._sampler().sample([p.tolist() for p in prompts], settings, seeds)
        answered = iter(zip(prompts, groups, strict=True))
        made = [None if n < 0 else _answer(*next(answered), self._max_length) for n in numbers]
        longest = max(item.length for item in made if item is not None)
        return pad_rows(made, bucket(longest, self._buckets)) | {"example": rows["example"]}

    def _prompt(self, number: int) -> np.ndarray:
        """The end of an example's prompt that leaves room for a completion."""
        item = self._items[number]
        room = max(1, self._max_length - self._config.max_tokens)
        return item.tokens[max(0, item.prompt - room) : item.prompt]

    def state(self) -> dict[int, dict]:
        """The position."""
        return self._inner.state()

    def restore(self, state: dict[int, dict], *, allow_changes: bool = False) -> None:
        """Go to a position."""
        self._inner.restore(state, allow_changes=allow_changes)

    def close(self) -> None:
        """Stop reading ahead."""
        self._inner.close()


def _answer(prompt: np.ndarray, group: Sequence[Any], max_length: int) -> Encoded:
    tokens = np.concatenate([prompt, group[0].tokens])[:max_length].astype(np.int32)
    mask = np.arange(len(tokens)) >= len(prompt)
    return Encoded(tokens=tokens, mask=mask, prompt=len(prompt))
