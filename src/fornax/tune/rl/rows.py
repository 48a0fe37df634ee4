"""From completions of different lengths to rows of few fixed shapes, and back.

Legend: R rows, T tokens of a row, n tokens of a completion (the prompt's are not counted).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fornax.tune.rl.rollouts import Rollout

__all__ = ["Packed", "Place", "pack", "row_counts"]


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a sequence lies: its slot `start + i` holds token i and is to predict token i + 1."""

    row: int
    start: int
    prompt: int
    """Tokens of the prompt."""
    completion: int
    """Tokens after the prompt."""

    @property
    def span(self) -> slice:
        """The slots whose targets are the completion's tokens."""
        first = self.start + self.prompt - 1
        return slice(first, first + self.completion)


@dataclass(frozen=True, kw_only=True)
class Packed:
    """The rows of one optimizer step before any loss: arrays [R, T], and where what lies."""

    rows: dict[str, np.ndarray]
    """tokens, targets, segment_ids, positions int32; loss_mask, sampler_logps float32."""
    places: tuple[Place, ...]
    """One for each sequence, in the order given."""

    def read(self, array_RT: np.ndarray, number: int) -> np.ndarray:
        """The [n] values of sequence `number`, one for each token of its completion."""
        place = self.places[number]
        return array_RT[place.row, place.span]

    def fill(self, values: Sequence[np.ndarray | float]) -> np.ndarray:
        """float32 [R, T] with each sequence's value, or its [n] values, on its completion."""
        filled = np.zeros(self.rows["tokens"].shape, np.float32)
        for place, value in zip(self.places, values, strict=True):
            filled[place.row, place.span] = value
        return filled


def row_counts(most: int, unit: int) -> tuple[int, ...]:
    """The row counts that steps may have: all, a half and a quarter, in multiples of `unit`.

    Args:
      most: sequences of a step: each has a row of its own at worst.
      unit: what a row count divides by, data shards times micro-batches.
    """
    return tuple(sorted({-(-most // (part * unit)) * unit for part in (1, 2, 4)}))


def pack(rollouts: Sequence[Rollout], *, length: int, counts: Sequence[int]) -> Packed:
    """Put sequences into the fewest rows that longest-first fitting finds.

    The number of rows is rounded up to one of `counts`, so that few programs are compiled. A
    sequence takes one slot less than it has tokens: its last token is only a target.

    Args:
      rollouts: the sequences; each takes at most `length` slots.
      length: slots of a row.
      counts: row counts allowed, rising; the last is enough for one sequence a row.
    """
    spots = _fit([r.length - 1 for r in rollouts], length)
    used = 1 + max((row for row, _ in spots), default=-1)
    shape = (next(count for count in counts if count >= used), length)
    rows = {
        name: np.zeros(shape, np.int32)
        for name in ("tokens", "targets", "segment_ids", "positions")
    }
    rows |= {name: np.zeros(shape, np.float32) for name in ("loss_mask", "sampler_logps")}
    segments = np.zeros(shape[0], np.int32)
    places = []
    for rollout, (row, start) in zip(rollouts, spots, strict=True):
        slots = slice(start, start + rollout.length - 1)
        sequence = rollout.sequence
        segments[row] += 1
        rows["tokens"][row, slots] = sequence[:-1]
        rows["targets"][row, slots] = sequence[1:]
        rows["segment_ids"][row, slots] = segments[row]
        rows["positions"][row, slots] = np.arange(len(sequence) - 1)
        place = Place(
            row=row, start=start, prompt=len(rollout.prompt), completion=len(rollout.tokens)
        )
        rows["loss_mask"][row, place.span] = rollout.mask
        rows["sampler_logps"][row, place.span] = np.where(rollout.mask, rollout.logprobs, 0)
        places.append(place)
    return Packed(rows=rows, places=tuple(places))


def _fit(lengths: Sequence[int], capacity: int) -> list[tuple[int, int]]:
    """(row, start) of each length: the longest first, each into the first row with room."""
    spots = [(0, 0)] * len(lengths)
    used: list[int] = []
    for number in sorted(range(len(lengths)), key=lambda n: (-lengths[n], n)):
        size = lengths[number]
        row = next((r for r, taken in enumerate(used) if taken + size <= capacity), len(used))
        if row == len(used):
            used.append(0)
        spots[number] = (row, used[row])
        used[row] += size
    return spots
