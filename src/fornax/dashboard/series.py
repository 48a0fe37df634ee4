"""The numbers of a run in columns, and curves of few points out of them.

A curve of more points than are asked for has the least and the greatest value of each of its
buckets, so that nothing that happened is thinned out.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

__all__ = ["AXES", "Axis", "Curve", "Table"]

Axis = Literal["step", "tokens", "time"]
AXES: tuple[Axis, ...] = ("step", "tokens", "time")
_RATE = "_per_second"
_MOST_NAMES = 2000
_LONGEST_NAME = 200
_MOST_NAN = 100

Record = dict[str, Any]


class _Growing:
    """An array that is appended to: a quarter larger whenever it is full."""

    def __init__(self, dtype: type) -> None:
        self._array = np.empty(16, dtype)
        self.size = 0

    @classmethod
    def of(cls, values: np.ndarray) -> "_Growing":
        """One that holds values, which are not written to."""
        made = cls(values.dtype.type)
        made._array, made.size = values, len(values)
        return made

    def extend(self, values: np.ndarray) -> None:
        end = self.size + len(values)
        if end > len(self._array):
            larger = np.empty(max(end, len(self._array) * 5 // 4), self._array.dtype)
            larger[: self.size] = self._array[: self.size]
            self._array = larger
        self._array[self.size : end] = values
        self.size = end

    @property
    def values(self) -> np.ndarray:
        return self._array[: self.size]

    @property
    def nbytes(self) -> int:
        return self._array.nbytes


class _Column:
    """The values of a name; `rows` says in which records they stood, None: in all of them."""

    def __init__(self, rows_before: int) -> None:
        self.values = _Growing(np.float64)
        self.rows: _Growing | None = None if rows_before == 0 else _Growing(np.int32)

    def extend(self, rows: np.ndarray, values: np.ndarray) -> None:
        """Append; the numbers of the rows rise."""
        if self.rows is None and (rows[0] != self.values.size or rows[-1] - rows[0] >= len(rows)):
            self.rows = _Growing(np.int32)
            self.rows.extend(np.arange(self.values.size, dtype=np.int32))
        if self.rows is not None:
            self.rows.extend(rows)
        self.values.extend(values)

    def places(self) -> np.ndarray:
        """The numbers of its rows, int32 `[values]`."""
        return np.arange(self.values.size) if self.rows is None else self.rows.values

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + (0 if self.rows is None else self.rows.nbytes)


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A curve of a metric; arrays of one length, NaN where a value is not finite."""

    x: np.ndarray
    y: np.ndarray
    low: np.ndarray
    high: np.ndarray
    n: int
    """Points that there are in the range."""
    raw: bool
    """Whether each of them is there by itself."""
    nan: np.ndarray = field(default_factory=lambda: np.empty(0))
    """Where values were not finite: the first hundred places on the x axis."""


class Table:
    """The records of a run's `metrics.jsonl`, a column for each name that has numbers."""

    def __init__(self) -> None:
        """A table of no record."""
        self.rows = 0
        """Records so far."""
        self._columns: dict[str, _Column] = {}

    @classmethod
    def of(cls, rows: int, columns: Sequence[tuple[str, np.ndarray, np.ndarray | None]]) -> "Table":
        """A table of this many records from what `columns` gave."""
        table = cls()
        table.rows = rows
        for name, values, places in columns:
            column = table._columns[name] = _Column(rows)
            column.values = _Growing.of(values)
            column.rows = None if places is None else _Growing.of(places)
        return table

    def columns(self) -> list[tuple[str, np.ndarray, np.ndarray | None]]:
        """Names, values, float64, and the numbers of their records, int32; None for all."""
        return [
            (name, each.values.values, None if each.rows is None else each.rows.values)
            for name, each in self._columns.items()
        ]

    @property
    def nbytes(self) -> int:
        """Memory of the arrays."""
        return sum(column.nbytes for column in self._columns.values())

    def append(self, records: Sequence[Record]) -> None:
        """Take records up: numbers, truth values, and null for what was not finite."""
        at = 0
        while at < len(records):
            end, names = at + 1, records[at].keys()
            while end < len(records) and records[end].keys() == names:
                end += 1
            self._append_alike(records[at:end])
            at = end

    def _append_alike(self, records: Sequence[Record]) -> None:
        rows = np.arange(self.rows, self.rows + len(records), dtype=np.int32)
        for name in records[0]:
            given = [record[name] for record in records]
            kept, values = _numbers(given, rows)
            if not len(values):
                continue
            column = self._columns.get(name)
            if column is None:
                if np.isnan(values).all() and name not in ("loss", "grad_norm"):
                    continue  # nobody knows yet that it is a number
                if len(self._columns) >= _MOST_NAMES or len(name) > _LONGEST_NAME:
                    continue
                column = self._columns[name] = _Column(self.rows)
            column.extend(kept, values)
        self.rows += len(records)

    def names(self) -> list[str]:
        """The metrics in order of their first appearance, without the axes."""
        axes = {"step", "time", self.counter()}
        return [name for name in self._columns if name not in axes]

    def counter(self) -> str | None:
        """What the axis `tokens` is: what the run counts besides steps, and logs the rate of."""
        rated = (name for name in self._columns if name + _RATE in self._columns)
        return next(rated, "tokens" if "tokens" in self._columns else None)

    def axes(self) -> list[Axis]:
        """The x axes that there are."""
        own = {"step": "step", "time": "time", "tokens": self.counter()}
        return [axis for axis in AXES if own[axis] in self._columns]

    def values(self, name: str) -> np.ndarray:
        """The values of a name, float64; empty where it has none."""
        column = self._columns.get(name)
        return np.empty(0) if column is None else column.values.values

    def dense(self, name: str) -> np.ndarray:
        """The value of a name in each record, float64 `[rows]`, NaN where it has none; empty where
        no record has one."""
        column = self._columns.get(name)
        if column is None:
            return np.empty(0)
        if column.rows is None and column.values.size == self.rows:
            return column.values.values
        whole = np.full(self.rows, np.nan)
        whole[column.places()] = column.values.values
        return whole

    def x(self, name: str, axis: Axis) -> np.ndarray:
        """Where the values of a name lie, float64; NaN where a record does not say."""
        column = self._columns.get(name)
        if column is None:
            return np.empty(0)
        along = self.dense((self.counter() or "tokens") if axis == "tokens" else axis)
        if not len(along):
            return np.full(column.values.size, np.nan)
        found = along[column.places()]
        return found - np.nanmin(along) if axis == "time" else found

    def curve(
        self,
        name: str,
        axis: Axis,
        points: int,
        begin: float | None = None,
        end: float | None = None,
    ) -> Curve:
        """The curve of a metric between two places of the axis, both included, as at most this many
        points."""
        x, y = self.x(name, axis), self.values(name)
        inside = np.isfinite(x)
        if begin is not None:
            inside &= x >= begin
        if end is not None:
            inside &= x <= end
        if not inside.all():
            x, y = x[inside], y[inside]
        if len(x) > 1 and (np.diff(x) < 0).any():
            order = np.argsort(x, kind="stable")
            x, y = x[order], y[order]
        missing = np.isnan(y)
        nan = x[missing][:_MOST_NAN]
        if len(x) <= points:
            return Curve(x=x, y=y, low=y, high=y, n=len(x), raw=True, nan=nan)
        starts = np.linspace(0, len(x), points, endpoint=False).astype(np.int64)
        counts = np.diff(starts, append=len(x))
        low, high = np.fmin.reduceat(y, starts), np.fmax.reduceat(y, starts)
        if missing.any():
            there = np.add.reduceat((~missing).astype(np.float64), starts)
            total = np.add.reduceat(np.where(missing, 0.0, y), starts)
            y = np.divide(total, there, out=np.full(points, np.nan), where=there > 0)
        else:
            y = np.add.reduceat(y, starts) / counts
        x = np.add.reduceat(x, starts) / counts
        return Curve(x=x, y=y, low=low, high=high, n=int(counts.sum()), raw=False, nan=nan)

    def last(self) -> Iterator[tuple[str, float]]:
        """The newest value of each name, the axes among them; NaN where it was not finite."""
        for name, column in self._columns.items():
            yield name, float(column.values.values[-1])


def _numbers(given: list[Any], rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The values that are numbers, NaN for those that are not finite, and their rows."""
    if isinstance(given[0], float | int | None):
        try:
            values = np.array(given, np.float64)
        except (TypeError, ValueError, OverflowError):
            pass
        else:
            if values.ndim == 1:
                values[np.isinf(values)] = np.nan
                return rows, values
    pairs = [
        (row, _finite(value))
        for row, value in zip(rows.tolist(), given, strict=True)
        if value is None or isinstance(value, float | int)
    ]
    if all(value is None for value in given) or not pairs:
        return rows[:0], np.empty(0)
    return (
        np.array([row for row, _ in pairs], np.int32),
        np.array([value for _, value in pairs], np.float64),
    )


def _finite(value: float | int | None) -> float:
    try:
        found = float("nan") if value is None else float(value)
    except OverflowError:
        return float("nan")
    return found if abs(found) < float("inf") else float("nan")
