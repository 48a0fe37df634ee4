"""What the hosts' threads did: busy and waiting time, what for, garbage collections, stages of the
input."""

import re
from collections.abc import Sequence

import numpy as np

from fornax.profile.causes import INPUT, WAITING
from fornax.profile.facts import Collection, Host, Ints, Stage, Step, Thread, Wait, WaitKind
from fornax.profile.intervals import Intervals
from fornax.profile.raw import Raw, RawRow
from fornax.profile.records import COLLECTION
from fornax.profile.xspace import own_time

_KINDS: tuple[tuple[WaitKind, re.Pattern[str]], ...] = (
    ("lock", re.compile(r"^\$(?!\S+\.py:\d+ ).*\bacquire(_lock)?$")),
    ("buffer", re.compile(r"^Wait for \w+ holds")),
    ("threads", re.compile(r"rendezvous|wait for completion|pending_threads|barrier", re.I)),
    ("device", re.compile(rf"^(?!\$)(?!request/).*{WAITING.pattern}", re.I)),
)
"""By the name of an event; `$` begins those of Python calls, the built-in ones without a file."""
_SHARED = re.compile(r"^\$(<|\w+ |threading\.py|queue\.py|_base\.py)")
"""Python calls on the way from who asks for a lock to the lock."""
_OWN = re.compile(r"^\$capture\.py:\d+ _(guard|begin|end)$")
"""The capture's own."""
_UNSEEN = (
    "Python's interpreter lock: nothing in a capture says which thread waits for it",
    "mutexes of XLA, of the C library and of extension modules: the profiler does not record them",
)
_NO_CALLS = (
    "locks of Python's threading and queue: they are in captures of Python calls, "
    "CaptureOptions(python=True)"
)
_BY_WITH = "locks that Python takes in a with statement: only calls of acquire are recorded"
_WAITING = re.compile(rf"{WAITING.pattern}|wait for completion", re.IGNORECASE)


def read_host(raws: Sequence[Raw], marked: Sequence[set[str]]) -> Host:
    """Threads and garbage collections of all ranks.

    Args:
        raws: each rank's rows.
        marked: names of each rank's step annotations, which span all of a step and say nothing of
            what the thread did.
    """
    threads, collections = [], []
    for raw, steps in zip(raws, marked, strict=True):
        rows: dict[str, list[RawRow]] = {}
        for row in raw.rows:
            if raw.rank == row.rank and (not row.device or row.device.startswith("cpu:")):
                rows.setdefault(row.name, []).append(row)
        threads += [_thread(raw.rank, name, held, steps) for name, held in rows.items()]
        collections += _collections(raw)
    threads.sort(key=lambda thread: (thread.rank, -thread.busy_seconds))
    waits = [wait for raw in raws for wait in _waits(raw)]
    calls = any(row.kind == "python" for raw in raws for row in raw.rows)
    return Host(
        threads=tuple(threads),
        collections=tuple(collections),
        waits=tuple(waits),
        unknown=(_BY_WITH if calls else _NO_CALLS, *_UNSEEN),
    )


def _waits(raw: Raw) -> list[Wait]:
    found: dict[tuple[WaitKind, str], tuple[set[str], list[int]]] = {}
    for row in raw.rows:
        if row.device:
            continue
        kinds = {name: kind for name in set(row.names) if (kind := _kind(name))}
        if not kinds:
            continue
        callers = _callers(row) if "lock" in kinds.values() else row.names
        for name, caller, duration in zip(row.names, callers, row.duration.tolist(), strict=True):
            kind = kinds.get(name)
            if kind is not None and not _OWN.match(caller):
                shown = caller.removeprefix("$") if kind == "lock" else name
                threads, times = found.setdefault((kind, shown), (set(), []))
                threads.add(row.name)
                times.append(duration)
    waits = [
        Wait(
            rank=raw.rank,
            kind=kind,
            name=name,
            threads=len(threads),
            count=len(times),
            seconds=sum(times) / 1e9,
        )
        for (kind, name), (threads, times) in found.items()
    ]
    return sorted(waits, key=lambda wait: wait.seconds, reverse=True)


def _kind(name: str) -> WaitKind | None:
    return next((kind for kind, pattern in _KINDS if pattern.search(name)), None)


def _callers(row: RawRow) -> list[str]:
    """For each event of a row the innermost call around it that is not part of taking a lock."""
    found, open_ = [], []
    ends = (row.begin + row.duration).tolist()
    for at, begin in enumerate(row.begin.tolist()):
        while open_ and ends[open_[-1]] <= begin:
            open_.pop()
        outer = (row.names[each] for each in reversed(open_) if not _SHARED.match(row.names[each]))
        found.append(next(outer, row.names[at]))
        open_.append(at)
    return found


def _thread(rank: int, name: str, rows: Sequence[RawRow], steps: set[str]) -> Thread:
    busy, waiting = [], []
    for row in rows:
        waits = np.array([bool(_WAITING.search(each)) for each in row.names], bool)
        works = ~np.isin(np.array(row.names), list(steps)) if steps else np.ones(len(waits), bool)
        end = row.begin + row.duration
        busy.append(Intervals.union(row.begin[works], end[works]))
        waiting.append(Intervals.union(row.begin[waits], end[waits]))
    return Thread(
        rank=rank, name=name, busy_seconds=_seconds(busy), waiting_seconds=_seconds(waiting)
    )


def _seconds(parts: Sequence[Intervals]) -> float:
    return Intervals.all_of(parts).length / 1e9


def _collections(raw: Raw) -> list[Collection]:
    return [
        Collection(
            rank=raw.rank,
            begin=int(begin),
            duration=int(duration),
            generation=int(name.removeprefix(COLLECTION)),
        )
        for row in raw.rows
        if row.kind == "host"
        for name, begin, duration in zip(row.names, row.begin, row.duration, strict=True)
        if name.startswith(COLLECTION)
    ]


def read_input(
    raws: Sequence[Raw], threads: Sequence[str], steps: Sequence[Sequence[Step]]
) -> tuple[Stage, ...]:
    """Stages of the input pipeline over all ranks, the one that steps waited longest for first.

    Args:
        raws: each rank's rows.
        threads: the row of each rank that makes its steps.
        steps: each rank's steps.
    """
    found: dict[str, list[tuple[int, int]]] = {}
    for raw, thread, own_steps in zip(raws, threads, steps, strict=True):
        windows = Intervals.union(
            np.array([step.begin for step in own_steps], np.int64),
            np.array([step.end for step in own_steps], np.int64),
        )
        for row in raw.rows:
            held = np.array([name.startswith(INPUT) for name in row.names], bool)
            if row.kind != "host" or not held.any():
                continue
            begin, duration = row.begin[held], row.duration[held]
            own = own_time(begin, duration)
            waited = _waited(begin, own, windows) if row.name == thread else np.zeros_like(own)
            names = [name for name in row.names if name.startswith(INPUT)]
            for name, spent, stopped in zip(names, own.tolist(), waited.tolist(), strict=True):
                found.setdefault(name.removeprefix(INPUT), []).append((spent, stopped))
    stages = [
        Stage(
            name=name,
            count=len(times),
            seconds=sum(spent for spent, _ in times) / 1e9,
            waited_seconds=sum(stopped for _, stopped in times) / 1e9,
        )
        for name, times in found.items()
    ]
    return tuple(sorted(stages, key=lambda s: (s.waited_seconds, s.seconds), reverse=True))


def _waited(begin: Ints, own: Ints, windows: Intervals) -> Ints:
    return np.where(windows.holds(begin), own, 0)
