"""Packing: documents of any length into rows of `seq_len` tokens.

A packer plans rows as lists of segments and never touches a token; `fornax.data.rows` copies them.
Its position is three integers, from which the rest is found again by reading:
`record` and `offset`, the first token not yet in an emitted group, and `row`, rows emitted of the
group.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import numpy as np

from fornax.config.errors import ConfigError, DataError


class Document(NamedTuple):
    """One tokenized document and its position in the shard's stream."""

    position: int
    tokens: np.ndarray


class Segment(NamedTuple):
    """Tokens `start : start + length` of a document, placed in a row."""

    tokens: np.ndarray
    start: int
    length: int


Row = list[Segment]


class Position(NamedTuple):
    """Where a packer stands: see the module's docstring."""

    record: int = 0
    offset: int = 0
    row: int = 0


class Documents(Protocol):
    """A stream of documents that can be read from any position."""

    def read_from(self, position: int) -> Iterator[Document]:
        """Documents at `position` and after; dropped records are left out."""
        ...

    @property
    def full_pass(self) -> int:
        """Positions within which every record has come once."""
        ...


class Packer(Iterator[Row], Protocol):
    """An iterator of rows with an exact position."""

    def position(self) -> Position:
        """The packer's position after the rows it gave."""
        ...


LongDocuments = Literal["split", "truncate", "drop"]


@dataclass(frozen=True, kw_only=True)
class ConcatThenSplit:
    """Documents end to end, cut every `seq_len` tokens: rows are full, documents are cut."""

    type: Literal["concat_then_split"] = "concat_then_split"

    def packer(self, documents: Documents, seq_len: int, position: Position, seed: int) -> Packer:
        """A packer that starts at `position`."""
        del seed  # rows leave in stream order
        return _ConcatThenSplitPacker(documents, seq_len, position)


@dataclass(frozen=True, kw_only=True)
class FirstFit:
    """Whole documents into the first open row with room; rows are padded, documents whole."""

    type: Literal["first_fit"] = "first_fit"
    bins: int = 64
    """Rows open at a time in each virtual shard; more fill better and look further ahead."""
    long_documents: LongDocuments = "split"
    """What to do with documents longer than a row: cut into rows, keep the head, or leave out."""

    def __post_init__(self) -> None:
        _check_bins("first_fit", self.bins)

    def packer(self, documents: Documents, seq_len: int, position: Position, seed: int) -> Packer:
        """A packer that starts at `position`."""
        return _BinPacker(
            documents, seq_len, position, seed, self.bins, self.long_documents, best=False
        )


@dataclass(frozen=True, kw_only=True)
class BestFit:
    """Whole documents into the open row they fill best; rows are padded, documents whole."""

    type: Literal["best_fit"] = "best_fit"
    bins: int = 64
    """Rows open at a time in each virtual shard; more fill better and look further ahead."""
    long_documents: LongDocuments = "split"
    """What to do with documents longer than a row: cut into rows, keep the head, or leave out."""

    def __post_init__(self) -> None:
        _check_bins("best_fit", self.bins)

    def packer(self, documents: Documents, seq_len: int, position: Position, seed: int) -> Packer:
        """A packer that starts at `position`."""
        return _BinPacker(
            documents, seq_len, position, seed, self.bins, self.long_documents, best=True
        )


@dataclass(frozen=True, kw_only=True)
class NoPacking:
    """One document per row, padded or cut to `seq_len`; for evaluation and short examples."""

    type: Literal["none"] = "none"
    long_documents: LongDocuments = "split"
    """What to do with documents longer than a row: cut into rows, keep the head, or leave out."""

    def packer(self, documents: Documents, seq_len: int, position: Position, seed: int) -> Packer:
        """A packer that starts at `position`."""
        del seed  # rows leave in stream order
        return _OnePerRowPacker(documents, seq_len, position, self.long_documents)


Packing = ConcatThenSplit | FirstFit | BestFit | NoPacking


def _check_bins(name: str, bins: int) -> None:
    if bins < 1:
        raise ConfigError(f"{name}: bins={bins} must be at least 1")


class _ConcatThenSplitPacker(Iterator[Row]):
    def __init__(self, documents: Documents, seq_len: int, position: Position):
        self._stream = documents.read_from(position.record)
        self._seq_len = seq_len
        self._position = position
        self._document: Document | None = None

    def position(self) -> Position:
        return self._position

    def __next__(self) -> Row:
        row: Row = []
        room = self._seq_len
        record, offset = self._position.record, self._position.offset
        while room:
            document = self._document
            if document is None:
                document = next(self._stream, None)
                if document is None:
                    break
                if document.position != record:
                    offset = 0
            left = len(document.tokens) - offset
            length = min(left, room)
            if length > 0:
                row.append(Segment(document.tokens, offset, length))
                room -= length
            if length < left:
                self._document = document
                record, offset = document.position, offset + length
            else:
                self._document = None
                record, offset = document.position + 1, 0
        if not row:
            raise StopIteration
        self._position = Position(record, offset, 0)
        return row


def _pieces(
    documents: Documents, start: Position, seq_len: int, long_documents: str
) -> Iterator[tuple[int, int, Segment]]:
    """Segments no longer than a row, each with the record and offset that follow it."""
    last_kept = start.record
    for document in documents.read_from(start.record):
        position, tokens = document
        end = len(tokens)
        if end > seq_len:
            if long_documents == "drop":
                if position - last_kept > documents.full_pass:
                    raise DataError(
                        f"every document is longer than seq_len={seq_len} and was dropped: "
                        "raise it, or set long_documents to split"
                    )
                continue
            if long_documents == "truncate":
                end = seq_len
        last_kept = position
        offset = start.offset if position == start.record else 0
        while offset < end:
            length = min(seq_len, end - offset)
            yield position, offset, Segment(tokens, offset, length)
            offset += length


class _OnePerRowPacker(Iterator[Row]):
    def __init__(self, documents: Documents, seq_len: int, position: Position, long: str):
        self._pieces = _pieces(documents, position, seq_len, long)
        self._position = position
        self._seq_len = seq_len
        self._long = long

    def position(self) -> Position:
        return self._position

    def __next__(self) -> Row:
        record, offset, segment = next(self._pieces)
        after = offset + segment.length
        whole = after >= len(segment.tokens) or self._long == "truncate"
        self._position = Position(record + 1, 0) if whole else Position(record, after)
        return [segment]


class _BinPacker(Iterator[Row]):
    """First-fit or best-fit over groups of `bins` rows.

    A group closes at the first piece that fits in none of its rows; its rows leave in an order
    drawn from the seed and the group's start, for the last rows opened are the emptiest.
    """

    def __init__(
        self,
        documents: Documents,
        seq_len: int,
        position: Position,
        seed: int,
        bins: int,
        long: str,
        *,
        best: bool,
    ):
        self._pieces = _pieces(documents, position, seq_len, long)
        self._seq_len = seq_len
        self._seed = seed
        self._bins = bins
        self._best = best
        self._group: list[Row] = []
        self._start = position
        self._next_start = position
        self._held: tuple[int, int, Segment] | None = None
        self._row = position.row
        if position.row:
            self._fill()

    def position(self) -> Position:
        if self._row >= len(self._group):
            return self._next_start
        return Position(self._start.record, self._start.offset, self._row)

    def __next__(self) -> Row:
        if self._row >= len(self._group):
            self._fill()
            self._row = 0
            if not self._group:
                raise StopIteration
        row = self._group[self._row]
        self._row += 1
        return row

    def _fill(self) -> None:
        self._start = self._next_start
        rows: list[Row] = [[] for _ in range(self._bins)]
        room = np.full(self._bins, self._seq_len, np.int64)
        used = 0
        piece = self._held or next(self._pieces, None)
        self._held = None
        end = self._start
        while piece is not None:
            record, offset, segment = piece
            bin_index = self._choose(room, used, segment.length)
            if bin_index is None:
                self._held = piece
                end = Position(record, offset, 0)
                break
            rows[bin_index].append(segment)
            room[bin_index] -= segment.length
            used = max(used, bin_index + 1)
            end = Position(record + 1, 0, 0)
            piece = next(self._pieces, None)
        self._next_start = end
        rng = np.random.default_rng((self._seed, self._start.record, self._start.offset))
        self._group = [rows[i] for i in rng.permutation(used)]

    def _choose(self, room: np.ndarray, used: int, length: int) -> int | None:
        """The row for a piece: an opened one with room if any, else the next empty one."""
        opened = room[:used]
        if self._best:
            left = np.where(opened >= length, opened, self._seq_len + 1)
            index = int(left.argmin()) if used else 0
            fits = used > 0 and left[index] <= self._seq_len
        else:
            fitting = opened >= length
            index = int(fitting.argmax()) if used else 0
            fits = used > 0 and bool(fitting[index])
        if fits:
            return index
        return used if used < self._bins else None
