"""The order of records: a pure function from (virtual shard, position) to (part, epoch, index).

Nothing here is state. Shard v of V reads, of every part of a mixture, the ranks v, v + V, v + 2V,
... of that part's endless stream of epochs; each epoch is its own permutation of all the part's
records. So the shards together use every record exactly once per epoch, whatever the number of
hosts.
"""

import functools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fornax.config.errors import DataError

# Mixture weights are fractions of this many draws; a weight below one draw is an error.
_PERIOD = 1 << 14
_ROUNDS = 6
_SMALLEST_BITS = 8


@dataclass(frozen=True)
class Places:
    """Where the records of a run of positions lie: int64 arrays `[n]`.

    `part` is -1 where a finite part is used up and the position holds nothing.
    """

    part: np.ndarray
    epoch: np.ndarray
    index: np.ndarray


def draws(weights: Sequence[float], period: int = _PERIOD) -> np.ndarray:
    """Integer draws per period, int64 `[parts]`, by largest remainder; they sum to `period`."""
    shares = np.asarray(weights, np.float64) / np.sum(weights) * period
    counts = np.floor(shares).astype(np.int64)
    order = np.argsort(-(shares - counts), kind="stable")
    counts[order[: period - int(counts.sum())]] += 1
    return counts


def schedule(counts: np.ndarray) -> np.ndarray:
    """A period of draws, spread as evenly as can be: part numbers int64 `[sum(counts)]`."""
    parts = np.repeat(np.arange(len(counts)), counts)
    times = np.concatenate([(np.arange(c) + 0.5) / c for c in counts])
    return parts[np.argsort(times, kind="stable")]


class Order:
    """The order of a mixture of parts over V virtual shards.

    Raises `DataError` for a weight too small to be drawn.
    """

    def __init__(
        self,
        names: Sequence[str],
        sizes: Sequence[int],
        weights: Sequence[float],
        *,
        shards: int,
        seed: int,
        shuffle: bool,
        epochs: int | None,
    ):
        self.names = tuple(names)
        self.sizes = np.asarray(sizes, np.int64)
        self.shards = shards
        self.seed = seed
        self.shuffle = shuffle
        self.epochs = epochs
        counts = draws(weights) if len(sizes) > 1 else np.ones(1, np.int64)
        for name, count, weight in zip(names, counts, weights, strict=True):
            if count == 0:
                raise DataError(
                    f"mixture part {name!r} has weight {weight}, below 1/{_PERIOD} of the sum: "
                    "raise it or leave the part out"
                )
        self._counts = counts
        self._schedule = schedule(counts)
        # before[p, t]: draws of part p before step t of the period.
        steps = self._schedule[None, :] == np.arange(len(counts))[:, None]
        self._before = np.cumsum(steps, axis=1) - steps

    @property
    def draws(self) -> list[int]:
        """Draws of each part in a period."""
        return self._counts.tolist()

    def length(self, shard: int) -> int | None:
        """Positions of a shard, or None when endless."""
        if self.epochs is None:
            return None
        return max((self._end(part, shard) for part in range(len(self.sizes))), default=0)

    def full_pass(self) -> int:
        """Positions of a shard within which every part has been gone through once."""
        cycles = -(-self.sizes // (self._counts * self.shards)) + 1
        return int(cycles.max()) * len(self._schedule)

    def _end(self, part: int, shard: int) -> int:
        """One past the position of the part's last draw in `shard`."""
        total = int(self.sizes[part]) * (self.epochs or 0)
        ranks = max(0, -(-(total - shard) // self.shards))
        if ranks == 0:
            return 0
        cycles, rest = divmod(ranks - 1, int(self._counts[part]))
        step = int(np.flatnonzero(self._schedule == part)[rest])
        return cycles * len(self._schedule) + step + 1

    def places(self, shard: int, start: int, count: int) -> Places:
        """Places of positions `start` to `start + count` of a shard."""
        positions = np.arange(start, start + count, dtype=np.int64)
        cycle, step = np.divmod(positions, len(self._schedule))
        part = self._schedule[step]
        rank = cycle * self._counts[part] + self._before[part, step]
        rank = rank * self.shards + shard
        epoch, index = np.divmod(rank, np.maximum(self.sizes[part], 1))
        if self.epochs is not None:
            part = np.where(epoch < self.epochs, part, -1)
        if self.shuffle:
            index = self._shuffled(part, epoch, index)
        return Places(part, epoch, index)

    def _shuffled(self, part: np.ndarray, epoch: np.ndarray, index: np.ndarray) -> np.ndarray:
        out = index.copy()
        for number, size in enumerate(self.sizes.tolist()):
            ours = part == number
            for e in np.unique(epoch[ours]).tolist():
                slots = ours & (epoch == e)
                seed = epoch_seed(self.seed, self.names[number], e)
                out[slots] = permuted(index[slots], size, seed)
        return out


def permuted(index: np.ndarray, size: int, seed: int) -> np.ndarray:
    """Images of `index` (int64 `[n]`, below `size`) under the permutation of 0..size-1 that `seed`
    names.

    A Feistel network over the next power of two, walked until the image is below `size`: no table,
    so a corpus of any size costs no memory. (Grain's `index_shuffle` does the same one index at a
    time over at least 2^16 values: 58 us for each index of a corpus of 600 records, against 0.3
    us.)
    """
    bits = max(_SMALLEST_BITS, (size - 1).bit_length())
    low = np.uint64(bits // 2)
    high_mask = np.uint64((1 << (bits - bits // 2)) - 1)
    low_mask = np.uint64((1 << (bits // 2)) - 1)
    keys = np.random.SeedSequence(seed).generate_state(_ROUNDS, np.uint64)
    out = index.astype(np.uint64)
    pending = np.arange(len(out))
    while len(pending):
        value = out[pending]
        left, right = value >> low, value & low_mask
        for number, key in enumerate(keys):
            if number % 2:
                right ^= _mixed(left, key) & low_mask
            else:
                left ^= _mixed(right, key) & high_mask
        out[pending] = (left << low) | right
        pending = pending[out[pending] >= size]
    return out.astype(np.int64)


def _mixed(value: np.ndarray, key: np.uint64) -> np.ndarray:
    """Steele, Lea and Flood's SplitMix64 finaliser (2014) of value + key, uint64."""
    value = value + key
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


@functools.lru_cache(maxsize=4096)
def epoch_seed(seed: int, name: str, epoch: int) -> int:
    """The seed of one part's permutation in one epoch, unsigned 32 bits."""
    words = (seed, zlib.crc32(name.encode()), epoch)
    return int(np.random.SeedSequence(words).generate_state(1)[0])
