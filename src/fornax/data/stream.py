"""One virtual shard as a stream of tokenized documents, readable from any position."""

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from fornax.config import worker_record
from fornax.config.errors import DataError, FornaxError
from fornax.data.annotate import stage
from fornax.data.order import Order, Places
from fornax.data.packing import Document
from fornax.data.records import Record, Source
from fornax.data.sources.array_record import ArrayRecordSource
from fornax.data.transforms import Chain

# The first read is small so that the first batch comes soon; each next one is larger.
_FIRST_READ, _GROWTH = 16, 4
_MOST_STORED, _MOST_TRANSFORMED = 2048, 64

Tokens = list[np.ndarray | None]
"""Token ids of a run of positions, None where there is no document."""


@dataclass
class Measure:
    """Seconds spent in a stage, and what went in and came out."""

    seconds: float = 0.0
    entered: int = 0
    left: int = 0


@dataclass
class StageTimes:
    """Measures by part and stage, in the order they ran; the part `""` is what all parts share."""

    stages: dict[tuple[str, str], Measure] = field(default_factory=dict)

    def add(self, part: str, stage: str, seconds: float, entered: int, left: int) -> None:
        """Count one call of a stage."""
        measure = self.stages.setdefault((part, stage), Measure())
        measure.seconds += seconds
        measure.entered += entered
        measure.left += left


@dataclass(frozen=True)
class PartReader:
    """One opened part of a mixture: which of its source's records are used, and its transforms."""

    name: str
    source: Source
    selected: np.ndarray | None
    """Source indices in use, int64 `[records]`; None: all."""
    chain: Chain
    skipped: tuple[tuple[int, int], ...] = ()
    """Ranges of source indices that are left out."""

    def __len__(self) -> int:
        return len(self.source) if self.selected is None else len(self.selected)

    def source_index(self, index: int) -> int:
        """The source's index of the part's record `index`."""
        return index if self.selected is None else int(self.selected[index])

    @property
    def stored_tokens(self) -> ArrayRecordSource | None:
        """The source when its records are token ids that nothing changes or leaves out."""
        source = self.source
        plain = not len(self.chain) and not self.skipped
        if plain and isinstance(source, ArrayRecordSource) and source.holds_tokens:
            return source
        return None

    def is_skipped(self, source_index: int) -> bool:
        """Whether a record lies in a range to leave out."""
        return any(start <= source_index < stop for start, stop in self.skipped)


class SpanReader(Protocol):
    """Reads spans of shards somewhere else, in any order."""

    ahead: int
    """Spans of each shard that may be read before they are needed."""

    def ask(self, stream: "ShardStream", start: int, count: int) -> Callable[[], Tokens]:
        """Have the records of `count` positions from `start` read; the result waits for them.

        What it returns, and raises, is what `stream.read(start, count)` would.
        """
        ...


@dataclass
class ShardStream:
    """The documents of one virtual shard.

    Positions count every draw of the order, whether its record is dropped or not; so a position
    means the same record whatever the transforms do.
    """

    shard: int
    order: Order
    parts: Sequence[PartReader]
    read_batch: int | None
    check: bool = False
    times: StageTimes | None = None
    reader: SpanReader | None = None
    """What reads and transforms in place of this process; None: this one does."""

    @property
    def full_pass(self) -> int:
        """Positions within which every record has come once."""
        return self.order.full_pass()

    def read_from(self, position: int) -> Iterator[Document]:
        """Documents at `position` and after."""
        barren = 0
        for start, tokens in self._spans_read(position):
            barren += len(tokens)
            for number, value in enumerate(tokens):
                if value is not None:
                    barren = 0
                    yield Document(start + number, value)
            if self.order.epochs is None and barren > self.full_pass:
                names = ", ".join(part.name for part in self.parts)
                raise DataError(f"every record of {names} was dropped: loosen the filters")

    def _spans_read(self, position: int) -> Iterator[tuple[int, Tokens]]:
        """Start and tokens of spans, some of them ahead where another process reads them."""
        spans = self._spans(position)
        if self.reader is None:
            yield from ((start, self.read(start, count)) for start, count in spans)
            return
        asked: deque[tuple[int, Callable[[], Tokens]]] = deque()
        while True:
            for start, count in itertools.islice(spans, self.reader.ahead - len(asked)):
                asked.append((start, self.reader.ask(self, start, count)))
            if not asked:
                return
            start, answer = asked.popleft()
            with stage("workers"):
                tokens = answer()
            yield start, tokens

    def _spans(self, position: int) -> Iterator[tuple[int, int]]:
        """Start and length of the reads from `position` on, growing."""
        length = self.order.length(self.shard)
        most = self.read_batch or (_MOST_STORED if self.stored else _MOST_TRANSFORMED)
        size = min(_FIRST_READ, most)
        while length is None or position < length:
            count = size if length is None else min(size, length - position)
            yield position, count
            position += count
            size = min(_GROWTH * size, most)

    @property
    def stored(self) -> bool:
        """Whether reading is all there is to do; a large read of transforms would stall a batch."""
        return all(part.stored_tokens is not None for part in self.parts)

    def read(self, start: int, count: int) -> Tokens:
        """The tokens at `count` positions, None where there are none."""
        places = self.order.places(self.shard, start, count)
        tokens: list[np.ndarray | None] = [None] * count
        for number, part in enumerate(self.parts):
            slots = np.flatnonzero(places.part == number).tolist()
            if slots:
                for slot, value in zip(slots, self._part(part, number, places, slots), strict=True):
                    tokens[slot] = value
        return tokens

    def _part(
        self, part: PartReader, number: int, places: Places, slots: list[int]
    ) -> Sequence[np.ndarray | None]:
        indices = [part.source_index(index) for index in places.index[slots].tolist()]
        stored = part.stored_tokens
        if stored is not None and not self.check:
            began = time.perf_counter()
            with stage("read"):
                tokens = stored.read_tokens(indices)
            self._note(part.name, "read", began, len(slots), len(slots))
            return tokens
        seeds = [
            (self.order.seed, number, int(places.epoch[slot]), index)
            for slot, index in zip(slots, indices, strict=True)
        ]

        def where(slot: int) -> str:
            return f"{part.name}: {part.source.locate(indices[slot])} (index {indices[slot]})"

        told = worker_record.opened()

        def note(slot: int) -> None:
            assert told is not None
            told.set_transformed(part.name, indices[slot])

        began = time.perf_counter()
        wanted = [i for i, index in enumerate(indices) if not part.is_skipped(index)]
        with stage("read"):
            found = self._fetch(part, [indices[i] for i in wanted])
        records: list[Record | None] = [None] * len(slots)
        for i, record in zip(wanted, found, strict=True):
            records[i] = record
        self._note(part.name, "read", began, len(slots), len(wanted))
        for index, name in enumerate(part.chain.names):
            began = time.perf_counter()
            before = sum(record is not None for record in records)
            with stage(name):
                records = part.chain.stage(index, records, seeds, where, note if told else None)
            after = sum(record is not None for record in records)
            self._note(part.name, name, began, before, after)
        if told is not None:
            told.set_transformed("", -1)
        return [self._tokens(record, where, i) for i, record in enumerate(records)]

    def _fetch(self, part: PartReader, indices: list[int]) -> list[Record]:
        if not indices:
            return []
        try:
            return part.source.__getitems__(indices)
        except FornaxError:
            raise
        except Exception as error:
            raise DataError(
                f"{part.name}: reading {part.source.locate(indices[0])} and "
                f"{len(indices) - 1} more failed: {type(error).__name__}: {error}"
            ) from error

    def _note(self, part: str, stage: str, began: float, entered: int, left: int) -> None:
        if self.times is not None:
            self.times.add(part, stage, time.perf_counter() - began, entered, left)

    def _tokens(
        self, record: Record | None, where: Callable[[int], str], slot: int
    ) -> np.ndarray | None:
        if record is None:
            return None
        tokens = record.get("tokens")
        if isinstance(tokens, np.ndarray) and tokens.ndim == 1 and tokens.dtype.kind in "iu":
            if self.check and len(tokens) and int(tokens.min()) < 0:
                raise DataError(f"{where(slot)} has the negative token {int(tokens.min())}")
            return tokens
        raise DataError(_no_tokens(record, tokens, where(slot)))


def _no_tokens(record: Record, tokens: object, where: str) -> str:
    if tokens is None:
        fields = ", ".join(sorted(record))
        return (
            f"{where} has no tokens, only {fields}: add the transform "
            "{type: tokenize, tokenizer: …}, or build a dataset with fornax data build"
        )
    described = getattr(tokens, "dtype", type(tokens).__name__)
    return f"{where} has tokens of {described}, they must be a one-dimensional array of integers"
