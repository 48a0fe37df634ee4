"""`open_batches`: an iterator of batches whose position is exact and independent of the hosts.

Shapes: B rows of the global batch, R rows of this process's arrays, T sequence length, V virtual
shards. The global batch is the concatenation over shards of B/V rows each, whatever the number of
processes. Each holds a contiguous block of it (`Hosts`) and reads the shards that the block meets:
where a shard's rows lie in two blocks, both processes read it and each keeps its own rows. What a
block lacks at the batch's end is padding.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from fornax.config.errors import ConfigError, DataError
from fornax.data.block import BlockDataset, Cursor, Element, split_block
from fornax.data.config import DataConfig
from fornax.data.packing import Position
from fornax.data.pipeline import Pipeline, open_pipeline
from fornax.data.prefetch import Prefetched
from fornax.data.remote import DataWorkers, RemoteReader
from fornax.data.rows import Batch, Hosts, fill
from fornax.data.sources.dataset import DatasetSource
from fornax.data.stream import PartReader, StageTimes

ShardState = dict[str, Any]
"""A virtual shard's position and what it is a position in; plain JSON."""

# Batches are filled together up to this many tokens: enough that the cost per call is small.
_TOGETHER = 1 << 17

_POSITION = ("record", "offset", "row")


def _tokens(part: PartReader) -> int | None:
    """Tokens of one pass over a part; None where they are not known before it was read."""
    source = part.stored_tokens
    return source.tokens if isinstance(source, DatasetSource) and part.selected is None else None


class Batches(Iterator[Batch]):
    """Batches of this process: see `open_batches`."""

    def __init__(
        self,
        pipeline: Pipeline,
        hosts: Hosts,
        times: StageTimes | None = None,
        agree: Callable[[int], int] | None = None,
        open_reader: Callable[[], RemoteReader] | None = None,
    ):
        if agree is None and hosts.count > 1 and pipeline.order.epochs is not None:
            raise DataError(
                f"a split that ends, read by {hosts.count} processes, needs `agree`: a function "
                "to the largest of the numbers that all of them call it with"
            )
        self._agree = agree
        self._pipeline = pipeline
        self._open_reader = open_reader
        self._reader: RemoteReader | None = None
        self._identity = pipeline.identity()
        self._times = times
        rows, each = hosts.rows(pipeline.batch_size), pipeline.rows_per_shard
        self._shards = range(rows.start // each, -(-rows.stop // each)) if rows else range(0)
        first = self._shards.start * each
        self._mine = slice(rows.start - first, rows.stop - first) if rows else slice(0)
        empty = hosts.size(pipeline.batch_size) - len(rows)
        self._padding = fill([[]] * empty, pipeline.seq_len) if empty else None
        self._cursors = {shard: Cursor() for shard in self._shards}
        self._blocks: list[Prefetched] = []
        self._ahead: deque[list[Element]] = deque()
        self._certain = 0
        self._look = 1
        self._ended = False

    def describe(self) -> dict[str, Any]:
        """What is read, JSON-able: `documents` (records, before transforms drop any), `tokens`
        (None where records are not stored tokens), `parts` of a mixture with their share of the
        draws, `packing`, `seq_len`, `batch_size`, `virtual_shards`, and `rows` of one pass (None
        where they are not known before it was made)."""
        pipeline = self._pipeline
        counts = [_tokens(part) for part in pipeline.parts]
        tokens = None if None in counts else sum(count or 0 for count in counts)
        draws = pipeline.order.draws
        parts = [
            {
                "name": part.name,
                "documents": len(part),
                "tokens": count,
                "share": drawn / sum(draws),
            }
            for part, count, drawn in zip(pipeline.parts, counts, draws, strict=True)
        ]
        return {
            "documents": sum(len(part) for part in pipeline.parts),
            "tokens": tokens,
            "parts": parts,
            "packing": pipeline.config.packing.type,
            "seq_len": pipeline.seq_len,
            "batch_size": pipeline.batch_size,
            "virtual_shards": pipeline.config.virtual_shards,
            "rows": None if tokens is None else tokens // pipeline.seq_len,
        }

    @property
    def shards(self) -> range:
        """The virtual shards that this process reads."""
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
        return self._joined(elements)

    def _joined(self, elements: list[Element]) -> Batch:
        """This process's rows, of those of the shards that it reads, then its padding."""
        parts = []
        if elements:
            rows = _concatenated([element.batch for element in elements])
            parts.append({name: array[self._mine] for name, array in rows.items()})
        if self._padding is not None:
            parts.append(self._padding)
        return _concatenated(parts)

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
        if not self._shards:
            return
        pipeline = self._pipeline
        if self._open_reader is not None:
            self._reader = self._open_reader()
            pipeline = replace(pipeline, reader=self._reader)
        for shards in split_block(self._shards, 1 if config.debug else config.prefetch.workers):
            cursors = {shard: self._cursors[shard] for shard in shards}
            workers = 0 if config.debug else config.prefetch.workers
            buffer = 0 if config.debug else config.prefetch.buffer
            together = max(1, min(buffer // 2, _TOGETHER // self._pipeline.tokens))
            dataset = BlockDataset(pipeline, cursors, together, self._times)
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
            state: the states of the virtual shards that this process reads, from `state()` of all
                that did.
            allow_changes: continue although the configuration or the data differ: each shard
                continues at its record, from that record's start. The number of virtual shards
                cannot change.

        Raises:
            DataError: a shard is missing, or the pipeline differs and changes are not allowed.
        """
        state = {int(shard): value for shard, value in state.items()}
        exact = _check(state, self._identity, self._shards, allow_changes=allow_changes)
        self.close()
        self._ended = False
        self._cursors = {shard: _cursor(state[shard], exact=exact) for shard in self._shards}

    def close(self) -> None:
        """Stop prefetching; the position stays where it is."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None
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


def _concatenated(parts: list[Batch]) -> Batch:
    if len(parts) == 1:
        return parts[0]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _cursor(state: ShardState, *, exact: bool) -> Cursor:
    position = Position(*(int(state[name]) for name in _POSITION))
    return Cursor(int(state["batch"]), position if exact else Position(position.record))


def _check(
    state: dict[int, ShardState], identity: dict[str, Any], read: range, *, allow_changes: bool
) -> bool:
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
    missing = sorted({*read} - {*state})
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
    row_multiple: int = 1,
    times: StageTimes | None = None,
    agree: Callable[[int], int] | None = None,
    workers: DataWorkers | None = None,
) -> Batches:
    """Open the batches of one process.

    Args:
        config: the pipeline.
        batch_size: rows of the global batch, B; a multiple of the virtual shards.
        seq_len: tokens of a row, T.
        split: `train` (repeats for `config.epochs`) or another split (one pass, in order).
        process_index: this process, from 0.
        process_count: processes that read together, any number.
        row_multiple: the rows of all processes together, padding included, are a multiple of it:
            the devices that share rows.
        times: when given, filled with the time and the records of every stage (no prefetch
            workers).
        agree: to the largest of the numbers that all processes call it with, at the same batches:
            how several processes learn together that a finite split has ended. Not needed by one
            process, or without end.

    Returns:
        An iterator of dicts of arrays `[R, T]`: `tokens`, `targets`, `segment_ids`, `positions`
        int32 and `loss_weights` float32. R is B rounded up to a multiple of `process_count` and
        `row_multiple`, divided by `process_count`. What the last processes lack, and what the last
        batches of a finite split lack, is rows of segment 0 and weight 0.

    Raises:
        DataError: sources are missing, damaged or empty, or there is no such process.
        ConfigError: the virtual shards do not divide the batch, or `workers` with
            `prefetch.workers` or `debug`.
    """
    pipeline = open_pipeline(config, batch_size=batch_size, seq_len=seq_len, split=split)
    hosts = Hosts(index=process_index, count=process_count, multiple=row_multiple)
    open_reader = None
    if workers is not None:
        _refuse_two_places(config)
        if not pipeline.stored:
            open_reader = partial(RemoteReader, workers, pipeline, split)
    return Batches(pipeline, hosts, times, agree, open_reader)


def _refuse_two_places(config: DataConfig) -> None:
    """Records are read by data workers, by prefetch's processes, or by the main thread."""
    for name, value in (("prefetch.workers", config.prefetch.workers), ("debug", config.debug)):
        if value:
            raise ConfigError(
                f"{name}={value} reads records on the host itself, and data workers read them "
                "elsewhere; leave one of them out"
            )
