"""A block of virtual shards as a Grain dataset: the unit that one thread or process prefetches."""

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import grain

from fornax.data.annotate import stage
from fornax.data.packing import Packer, Position, Row
from fornax.data.pipeline import Pipeline
from fornax.data.rows import Batch, fill
from fornax.data.stream import StageTimes


class Cursor(NamedTuple):
    """A virtual shard's position: batches given so far, and where its packer stands."""

    batch: int = 0
    position: Position = Position()


@dataclass(frozen=True)
class Element:
    """A block's rows of one batch, its cursors after it, and whether any row holds a token."""

    batch: Batch
    cursors: dict[int, Cursor]
    alive: bool


class BlockDataset(grain.IterDataset):
    """Lists of `together` batches of some virtual shards, endless: exhausted shards give padding.

    Several batches are filled at once and handed over at once, for both cost per call.

    The iterator's state is the shards' cursors, so Grain's prefetching saves and restores it
    exactly.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        cursors: dict[int, Cursor],
        together: int = 1,
        times: StageTimes | None = None,
    ):
        super().__init__()
        self._pipeline = pipeline
        self._cursors = dict(cursors)
        self._together = together
        self._times = times

    def __iter__(self) -> "BlockIterator":
        return BlockIterator(self._pipeline, self._cursors, self._together, self._times)


class BlockIterator(grain.DatasetIterator):
    """See `BlockDataset`."""

    def __init__(
        self,
        pipeline: Pipeline,
        cursors: dict[int, Cursor],
        together: int,
        times: StageTimes | None = None,
    ):
        super().__init__()
        self._pipeline = pipeline
        self._together = together
        self._times = times
        self._start(cursors)

    def _start(self, cursors: dict[int, Cursor]) -> None:
        self._batch = {shard: cursor.batch for shard, cursor in cursors.items()}
        self._packers: dict[int, Packer] = {
            shard: self._pipeline.packer(shard, cursor.position, self._times)
            for shard, cursor in sorted(cursors.items())
        }

    def __next__(self) -> list[Element]:
        began = time.perf_counter()
        with stage("pack"):
            planned = [self._plan() for _ in range(self._together)]
            rows = [row for batch, _ in planned for row in batch]
        middle = time.perf_counter()
        with stage("fill"):
            arrays = fill(rows, self._pipeline.seq_len)
        if self._times is not None:
            segments = sum(len(row) for row in rows)
            self._times.add("", "pack", middle - began, segments, len(rows))
            self._times.add("", "fill", time.perf_counter() - middle, len(rows), len(planned))
        elements = []
        start = 0
        for batch, cursors in planned:
            end = start + len(batch)
            part = {name: array[start:end] for name, array in arrays.items()}
            elements.append(Element(part, cursors, any(batch)))
            start = end
        return elements

    def _plan(self) -> tuple[list[Row], dict[int, Cursor]]:
        """The rows of the next batch that is not skipped, and the cursors after it."""
        rows = self._rows()
        while self._is_skipped():
            self._advance()
            rows = self._rows()
        self._advance()
        return rows, self._cursors()

    def _rows(self) -> list[Row]:
        count = self._pipeline.rows_per_shard
        return [next(packer, []) for packer in self._packers.values() for _ in range(count)]

    def _is_skipped(self) -> bool:
        batch = next(iter(self._batch.values()))
        return any(start <= batch < stop for start, stop in self._pipeline.skip_steps)

    def _advance(self) -> None:
        self._batch = {shard: batch + 1 for shard, batch in self._batch.items()}

    def _cursors(self) -> dict[int, Cursor]:
        return {
            shard: Cursor(self._batch[shard], packer.position())
            for shard, packer in self._packers.items()
        }

    def get_state(self) -> dict[str, object]:
        """The shards' cursors."""
        return {"cursors": _Frozen(self._cursors())}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from a state of `get_state`."""
        self._start(dict(state["cursors"]))


class _Frozen(dict[int, Cursor]):
    """Cursors that are never changed, so that Grain's copy of every state costs nothing."""

    def __deepcopy__(self, memo: dict[int, object]) -> "_Frozen":
        del memo
        return self


def split_block(shards: Sequence[int], workers: int) -> list[list[int]]:
    """Contiguous groups of shards, one for each worker, as even as can be."""
    count = max(1, min(workers, len(shards)))
    edges = [round(i * len(shards) / count) for i in range(count + 1)]
    return [list(shards[a:b]) for a, b in itertools.pairwise(edges)]
