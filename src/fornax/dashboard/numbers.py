"""The numbers of runs: read whole once, then only what was appended; within a bound of memory."""

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from fornax.config import environment
from fornax.dashboard.alerts import SpikeWatch
from fornax.dashboard.folder import Folder
from fornax.dashboard.lines import Tail, parse
from fornax.dashboard.reading import Reader, Reading
from fornax.dashboard.series import Axis, Curve, Table

__all__ = ["LIMIT_BYTES", "Numbers", "NumbersCache", "Query"]

LIMIT_BYTES = 256 << 20
"""Memory for columns; runs that were not looked at for longest give theirs up."""
_ANSWERS_BYTES = 128 << 20
_AT_ONCE = 48 << 20
"""Bytes of files that one question has read whole; of the rest it gets samples first."""
_SAMPLES, _SAMPLE_BYTES = 48, 4 << 10
_MOST_READERS = min(4, environment.usable_cores())
"""Processes that read runs ahead."""
_IDLE_SECONDS = 2.0
"""After which a process that has nothing to read ends."""


@dataclass(frozen=True)
class Query:
    """One curve."""

    run: str
    name: str
    axis: Axis
    points: int
    begin: float | None
    end: float | None


class Numbers:
    """The metrics of one run as far as they were read."""

    def __init__(self, folder: Folder, path: Path) -> None:
        """Nothing is read yet."""
        self._path = path
        self._reading = Reading(folder, path)
        self.complete = False
        """Whether it was read to its end once."""
        self._lock = threading.Lock()

    @property
    def tail(self) -> Tail:
        """Where it was read to."""
        return self._reading.tail

    @property
    def table(self) -> Table:
        """Its columns."""
        return self._reading.table

    @property
    def spikes(self) -> SpikeWatch:
        """The spikes in it."""
        return self._reading.spikes

    def read(self) -> None:
        """Take in what there is; begin again where the file is another one."""
        with self._lock:
            self._reading.go_on()
            self.complete = True

    def read_by(self, reader: Reader) -> None:
        """Have another process take in what there is, unless some was read here.

        Raises:
          EOFError: that process ended.
          TimeoutError: it takes too long.
        """
        with self._lock:
            if not self.complete:
                reader.read(self._reading, self._path)

    def curve(self, query: Query) -> Curve:
        """A curve of what was read."""
        with self._lock:
            return self._reading.table.curve(
                query.name, query.axis, query.points, query.begin, query.end
            )


class NumbersCache:
    """The numbers of many runs. Methods may be called from any thread."""

    def __init__(self, folder: Folder, limit_bytes: int = LIMIT_BYTES) -> None:
        """Nothing is read yet.

        Args:
          limit_bytes: for the columns of all runs.
        """
        self._folder, self._limit = folder, limit_bytes
        self._runs: OrderedDict[str, Numbers] = OrderedDict()
        self._answers: OrderedDict[Query, tuple[object, bytes]] = OrderedDict()
        self._answers_bytes = 0
        self._wanted: OrderedDict[str, tuple[Path, dict[Query, None]]] = OrderedDict()
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._threads: list[threading.Thread] = []
        self._asked = 0
        """Questions that are being answered, for which the threads that read ahead wait."""
        self._closed = False
        self.completed: dict[str, int] = {}
        """How often the numbers of a run became whole, by its name."""

    def close(self) -> None:
        """End the threads that read, and their processes."""
        with self._work:
            self._closed = True
            self._work.notify_all()
        for thread in self._threads:
            thread.join()

    @property
    def nbytes(self) -> int:
        """Memory of all columns."""
        with self._lock:
            return sum(each.table.nbytes for each in self._runs.values())

    def known(self, run: str) -> Numbers | None:
        """The numbers of a run that was read whole."""
        with self._lock:
            found = self._runs.get(run)
        return found if found is not None and found.complete else None

    def whole(self, run: str, path: Path) -> Numbers:
        """The numbers of a run, all that there are now."""
        with self._lock:
            found = self._runs.setdefault(run, Numbers(self._folder, path))
            self._runs.move_to_end(run)
            self._wanted.pop(run, None)
        before = found.complete
        found.read()
        with self._lock:
            if not before:
                self.completed[run] = self.completed.get(run, 0) + 1
            self._evict(run)
        return found

    def forget(self, known: Callable[[str], bool]) -> None:
        """Drop the runs that are not there any more."""
        with self._lock:
            for run in [run for run in self._runs if not known(run)]:
                del self._runs[run]

    def _evict(self, keep: str) -> None:
        used = sum(each.table.nbytes for each in self._runs.values())
        for run in list(self._runs):
            if used <= self._limit:
                return
            if run != keep:
                used -= self._runs.pop(run).table.nbytes

    def series(self, queries: Sequence[tuple[Query, Path]]) -> bytes:
        """The answers to questions as a JSON array; see `fornax.dashboard.api`."""
        with self._lock:
            self._asked += 1
        try:
            return self._series(queries)
        finally:
            with self._work:
                self._asked -= 1
                self._work.notify_all()

    def _series(self, queries: Sequence[tuple[Query, Path]]) -> bytes:
        room = _AT_ONCE
        answers: list[bytes] = []
        sampled: dict[str, tuple[Table, int]] = {}
        for query, path in queries:
            found = self._folder.stat(path)
            size = 0 if found is None else found.st_size
            kept = self._kept(query, _version(found))
            if kept is not None:
                answers.append(kept)
                continue
            numbers = self.known(query.run)
            if numbers is None and size > room and size > 2 * _SAMPLES * _SAMPLE_BYTES:
                answers.append(self._first(query, path, _version(found), sampled))
                self._want(query, path)
                continue
            room -= 0 if numbers else size
            answers.append(self._exact(query, path))
        return b"[" + b",".join(answers) + b"]"

    def _first(
        self, query: Query, path: Path, version: object, sampled: dict[str, tuple[Table, int]]
    ) -> bytes:
        """The answer from samples; those of a run are taken once for all that is asked of it."""
        kept = self._kept(query, ("sampled", version))
        if kept is not None:
            return kept
        if query.run not in sampled:
            sampled[query.run] = _sample(self._folder, path)
        table, offset = sampled[query.run]
        curve = table.curve(query.name, query.axis, query.points, query.begin, query.end)
        answer = _answer(query, curve, offset, complete=False)
        self._keep(query, ("sampled", version), answer)
        return answer

    def _exact(self, query: Query, path: Path) -> bytes:
        numbers = self.whole(query.run, path)
        answer = _answer(query, numbers.curve(query), numbers.tail.offset, complete=True)
        self._keep(query, _version(self._folder.stat(path)), answer)
        return answer

    def _kept(self, query: Query, version: object) -> bytes | None:
        with self._lock:
            kept = self._answers.get(query)
            if kept is None or kept[0] != version:
                return None
            self._answers.move_to_end(query)
            return kept[1]

    def _keep(self, query: Query, version: object, answer: bytes) -> None:
        with self._lock:
            old = self._answers.pop(query, None)
            self._answers_bytes += len(answer) - (0 if old is None else len(old[1]))
            self._answers[query] = (version, answer)
            while self._answers_bytes > _ANSWERS_BYTES:
                _, (_, gone) = self._answers.popitem(last=False)
                self._answers_bytes -= len(gone)

    def _want(self, query: Query, path: Path) -> None:
        """Have a run read whole in the background, and a question answered then."""
        with self._work:
            _, queries = self._wanted.setdefault(query.run, (path, {}))
            if len(queries) < 64:
                queries[query] = None
            if len(self._threads) < min(_MOST_READERS, len(self._wanted)) and not self._closed:
                thread = threading.Thread(target=self._read_wanted, daemon=True)
                self._threads.append(thread)
                thread.start()
            self._work.notify()

    def _read_wanted(self) -> None:
        """Take one run after the other, by a process of this thread that lives while there are."""
        reader: Reader | None = None
        while (wanted := self._next_wanted(0.0 if reader is None else _IDLE_SECONDS)) is not None:
            run, path, queries = wanted
            if not run:
                reader = _closed(reader)
                continue
            try:
                reader = reader or Reader(self._folder)
                with self._lock:
                    numbers = self._runs.setdefault(run, Numbers(self._folder, path))
                numbers.read_by(reader)
            except (EOFError, TimeoutError, OSError):  # then it is read here
                reader = _closed(reader)
            for query in queries:
                self._exact(query, path)
        _closed(reader)

    def _next_wanted(self, seconds: float) -> tuple[str, Path, Sequence[Query]] | None:
        """A run to read; none, of no name, when this many seconds (0: any time) passed without one;
        None at the end."""
        with self._work:
            while (not self._wanted or self._asked) and not self._closed:
                if not self._work.wait(seconds or None) and not self._wanted:
                    return "", Path(), ()
            if self._closed:
                return None
            run, (path, queries) = self._wanted.popitem(last=False)
            return run, path, tuple(queries)


def _closed(reader: Reader | None) -> None:
    if reader is not None:
        reader.close()


def _version(found: os.stat_result | None) -> object:
    return None if found is None else (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


def _sample(folder: Folder, path: Path) -> tuple[Table, int]:
    """Records from places spread evenly over a file, and the offset behind the last."""
    table, offset = Table(), 0
    records: list[dict[str, Any]] = []
    try:
        descriptor = folder.open(path)
    except OSError:
        return table, offset
    try:
        size = os.fstat(descriptor).st_size
        if hasattr(os, "posix_fadvise"):  # what lies between the places is not read ahead
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        for place in np.linspace(0, size - _SAMPLE_BYTES, _SAMPLES).astype(int).tolist():
            data = os.pread(descriptor, _SAMPLE_BYTES, place)
            begin = 0 if place == 0 else data.find(b"\n") + 1
            end = data.rfind(b"\n") + 1
            if end > begin:
                records += parse(data[begin:end])[0]
                offset = place + end
    except OSError:
        pass
    finally:
        os.close(descriptor)
    table.append(records)
    return table, offset


def _answer(query: Query, curve: Curve, offset: int, *, complete: bool) -> bytes:
    number = np.float64 if curve.raw else np.float32
    y = np.ascontiguousarray(curve.y, number)
    alike = curve.low is curve.y
    return orjson.dumps(
        {
            "run": query.run,
            "name": query.name,
            "x": np.ascontiguousarray(curve.x),
            "y": y,
            "min": y if alike else np.ascontiguousarray(curve.low, number),
            "max": y if alike else np.ascontiguousarray(curve.high, number),
            "nan": np.ascontiguousarray(curve.nan),
            "n": curve.n,
            "raw": curve.raw,
            "complete": complete,
            "offset": offset,
        },
        option=orjson.OPT_SERIALIZE_NUMPY,
    )
