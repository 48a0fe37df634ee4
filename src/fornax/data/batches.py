"""`open_batches`: an iterator of batches whose position is exact and independent of the hosts.

Shapes: B global batch, T sequence length, V virtual shards, P processes. The global batch is the
concatenation over shards of B/V rows each; process p owns V/P neighbouring shards, so its rows are
a contiguous block of the global batch.
"""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from fornax.config.errors import DataError
from fornax.data.block import BlockDataset, Cursor, Element, split_block
from fornax.data.config import DataConfig
from fornax.data.packing import Position
from fornax.data.pipeline import Pipeline, open_pipeline
from fornax.data.prefetch import Prefetched
from fornax.data.rows import Batch
from fornax.data.stream import StageTimes

ShardState = dict[str, Any]
"""A virtual shard's position and what it is a position in; plain JSON."""

# Batches are filled together up to so many tokens: enough that the cost per call is small.
_TOGETHER = 1 << 17

_POSITION = ("record", "offset", "row")


class Batches(Iterator[Batch]):
    """Batches of this process: see `open_batches`."""

    def __init__(
        self,
        pipeline: Pipeline,
        process_index: int,
        process_count: int,
        times: StageTimes | None = None,
        agree: Callable[[int], int] | None = None,
    ):
        if agree is None and process_count > 1 and pipeline.order.epochs is not None:
            raise DataError(
                f"a split that ends, read by {process_count} processes, needs `agree`: a function "
                "to the largest of the numbers that all of them call it with"
            )
        self._agree = agree
        self._pipeline = pipeline
        self._identity = pipeline.identity()
        self._times = times
        shards = pipeline.config.virtual_shards
        block = shards // process_count
        self._shards = range(process_index * block, (process_index + 1) * block)
        self._cursors = {shard: Cursor() for shard in self._shards}
        self._blocks: list[Prefetched] = []
        self._ahead: deque[list[Element]] = deque()
        self._certain = 0
        self._look = 1
        self._ended = False

    @property
    def shards(self) -> range:
        """The virtual shards of this process."""
        return self._shards

    def __iter__(self) -> "Batches":
        return self

    def __next__(self) -> Batch:
        if not self._certain and not self._ended:
            self._look_ahead()
        if not self._certain:
            self.close()
            raise StopIteration
        self._certain -= 1
        elements = self._ahead.popleft() if self._ahead else self._pull()
        self._cursors = {s: c for element in elements for s, c in element.cursors.items()}
        return _joined(elements)

    def _pull(self) -> list[Element]:
        if not self._blocks:
            self._start()
        return [next(block) for block in self._blocks]

    def _look_ahead(self) -> None:
        """Learn of how many more batches it is certain that some process has records for them.

        A process whose shards have ended gives padding until those of all have. They exchange how
        many batches each sees before it, one at first, then up to a buffer full.
        """
        if self._pipeline.order.epochs is None:
            self._certain = 1
            return
        live = 0
        while live < self._look:
            self._ahead.append(self._pull())
            if not any(element.alive for element in self._ahead[-1]):
                break
            live += 1
        self._certain = live if self._agree is None else self._agree(live)
        self._ended = self._certain < self._look
        if self._agree is not None:
            self._look = max(1, min(2 * self._look, self._pipeline.config.prefetch.buffer))

    def _start(self) -> None:
        config = self._pipeline.config
        for shards in split_block(self._shards, 1 if config.debug else config.prefetch.workers):
            cursors = {shard: self._cursors[shard] for shard in shards}
            workers = 0 if config.debug else config.prefetch.workers
            buffer = 0 if config.debug else config.prefetch.buffer
            together = max(1, min(buffer // 2, _TOGETHER // self._pipeline.tokens))
            dataset = BlockDataset(self._pipeline, cursors, together, self._times)
            lists = -(-buffer // together)
            self._blocks.append(Prefetched(dataset, buffer=lists, process=workers > 0))

    def start_prefetch(self) -> None:
        """Begin to make batches now rather than at the first `next`."""
        if not self._blocks:
            self._start()
        for block in self._blocks:
            block.start()

    def state(self) -> dict[int, ShardState]:
        """Position after the last batch given, of this process's virtual shards; plain JSON."""
        return {
            shard: {
                "batch": cursor.batch,
                **{name: getattr(cursor.position, name) for name in _POSITION},
                **self._identity,
            }
            for shard, cursor in self._cursors.items()
        }

    def restore(self, state: dict[int, ShardState], *, allow_changes: bool = False) -> None:
        """Continue after the batch at which `state` was taken.

        Args:
            state: the states of all virtual shards, from `state()` of every process.
            allow_changes: continue although the configuration or the data differ: each shard goes
                on at its record, from that record's start. The number of virtual shards cannot
                change.

        Raises:
            DataError: a shard is missing, or the pipeline differs and changes are not allowed.
        """
        state = {int(shard): value for shard, value in state.items()}
        exact = _check(state, self._identity, allow_changes=allow_changes)
        self.close()
        self._ended = False
        self._cursors = {shard: _cursor(state[shard], exact=exact) for shard in self._shards}

    def close(self) -> None:
        """Stop prefetching; the position stays where it is."""
        for block in self._blocks:
            block.close()
        self._blocks = []
        self._ahead.clear()
        self._ended = self._ended and not self._certain
        self._certain, self._look = 0, 1

    def __enter__(self) -> "Batches":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _joined(elements: list[Element]) -> Batch:
    if len(elements) == 1:
        return elements[0].batch
    names = elements[0].batch
    return {name: np.concatenate([element.batch[name] for element in elements]) for name in names}


def _cursor(state: ShardState, *, exact: bool) -> Cursor:
    position = Position(*(int(state[name]) for name in _POSITION))
    return Cursor(int(state["batch"]), position if exact else Position(position.record))


def _check(state: dict[int, ShardState], identity: dict[str, Any], *, allow_changes: bool) -> bool:
    """Whether a saved position is exact under this pipeline; `DataError` when it is unusable."""
    shards = identity["virtual_shards"]
    if not state:
        raise DataError("the saved data position is empty: there is nothing to restore")
    saved = next(iter(state.values()))
    found = saved.get("virtual_shards", len(state))
    if found != shards:
        raise DataError(
            f"virtual_shards={shards} but the saved position has {found}: the number is fixed "
            f"for the life of a run; set virtual_shards to {found}"
        )
    missing = sorted(set(range(shards)) - set(state))
    if missing:
        raise DataError(
            f"the saved position lacks the virtual shards {missing}: give all processes' states"
        )
    changes = [
        f"{name} was {saved.get(name)} and is {value}"
        for name, value in identity.items()
        if saved.get(name) != value
    ]
    if changes and not allow_changes:
        raise DataError(
            f"the data differs from that of the saved position ({'; '.join(changes)}): restore the "
            "configuration, or accept the change"
        )
    return not changes


def count_batches(pipeline: Pipeline) -> int:
    """Batches of a finite pipeline, the same on every process; reads all records once."""
    rows = 0
    for shard in range(pipeline.config.virtual_shards):
        packer = pipeline.packer(shard, Position())
        rows = max(rows, sum(1 for _ in packer))
    return -(-rows // pipeline.rows_per_shard)


def open_batches(
    config: DataConfig,
    *,
    batch_size: int,
    seq_len: int,
    split: str = "train",
    process_index: int = 0,
    process_count: int = 1,
    times: StageTimes | None = None,
    agree: Callable[[int], int] | None = None,
) -> Batches:
    """Open the batches of one process.

    Args:
        config: the pipeline.
        batch_size: rows of the global batch, B; a multiple of the virtual shards.
        seq_len: tokens of a row, T.
        split: `train` (repeats for `config.epochs`) or another split (one pass, in order).
        process_index: this process, from 0.
        process_count: processes that read together; a divisor of the virtual shards.
        times: when given, filled with the time and the records of every stage (no prefetch
            workers).
        agree: to the largest of the numbers that all processes call it with, at the same batches:
            how several processes learn together that a finite split has ended. Not needed by one
            process, or without end.

    Returns:
        An iterator of dicts of arrays `[B / process_count, T]`: `tokens`, `targets`, `segment_ids`,
        `positions` int32 and `loss_weights` float32. The last batches of a finite split are padded
        with rows of segment 0.

    Raises:
        DataError: sources are missing, damaged or empty, or batch, shards and processes do not
            divide.
    """
    pipeline = open_pipeline(config, batch_size=batch_size, seq_len=seq_len, split=split)
    shards = config.virtual_shards
    if not 0 <= process_index < process_count:
        raise DataError(f"process_index={process_index} is outside [0, {process_count})")
    if shards % process_count:
        raise DataError(
            f"virtual_shards={shards} do not divide over {process_count} processes: use a number "
            f"of processes that divides {shards}"
        )
    return Batches(pipeline, process_index, process_count, times, agree)
