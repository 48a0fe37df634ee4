"""What happens to runs as events for browsers: files are looked at five times a second."""

import asyncio
import contextlib
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fornax.dashboard.encoding import encode
from fornax.dashboard.lines import Tail
from fornax.dashboard.runs import Found
from fornax.dashboard.store import RunStore

__all__ = ["Watcher", "watch_events"]

_TICK = 0.2
_LIST_SECONDS = 1.0
_SHARE = 0.02
"""Of one core that looking at all runs may take, and at the other files of those followed."""
_QUIET = 15.0
"""Seconds after which a stream says that it is still there."""
_AT_ONCE = 256 << 10
_MOST_RECORDS = 1000
_OTHERS = ("samples.jsonl", "goodput.jsonl", "events.jsonl", "server.jsonl", "spikes.jsonl",
           "config.yaml", "program.json", "plan.json", "data.json", "requests", "profile",
           "checkpoints", "images")  # fmt: skip
_OTHER_SECONDS = 1.0


class Watcher:
    """Looks at the files of the runs that somebody follows, once for all who do."""

    def __init__(self, store: RunStore) -> None:
        """Begins with the first who follows something."""
        self._store = store
        self._followed: Counter[str] = Counter()
        self._listening = 0
        self._task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._cost = 0.0
        self.closed = False
        self.metrics: dict[str, object] = {}
        """Of each followed run, what changes whenever its metrics do."""
        self.others: dict[str, dict[str, object]] = {}
        """The same of its other files."""
        self.lines: dict[str, tuple[int, dict[str, Any]]] = {}
        """Each run's line in the list, and how often it became another."""

    async def close(self) -> None:
        """End all streams."""
        self.closed = True
        self._changed.set()
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    @contextlib.contextmanager
    def follow(self, runs: Sequence[str]):
        """Have the files of runs looked at, and the list."""
        self._followed.update(runs)
        self._listening += 1
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._look())
        try:
            yield
        finally:
            self._followed.subtract(runs)
            self._followed += Counter()  # without those that nobody follows
            self._listening -= 1

    @property
    def next_change(self) -> asyncio.Event:
        """Set when something changes after now: to be taken before one looks what there is."""
        return self._changed

    async def _look(self) -> None:
        others_at = list_at = 0.0
        while self._listening and not self.closed:
            now = time.monotonic()
            changed = self._look_at_metrics()
            if now >= others_at:
                began = time.thread_time()
                changed |= self._look_at_others()
                cost = time.thread_time() - began
                others_at = now + max(_OTHER_SECONDS, cost / _SHARE)
            if now >= list_at:
                changed |= await self._look_at_list()
                list_at = time.monotonic() + max(_LIST_SECONDS, self._cost / _SHARE)
            if changed:
                event, self._changed = self._changed, asyncio.Event()
                event.set()
            await asyncio.sleep(_TICK)

    def _look_at_metrics(self) -> bool:
        found: dict[str, object] = {}
        for name in self._followed:
            run = self._store.known(name)
            completed = self._store.numbers.completed.get(name, 0)
            found[name] = (None if run is None else _state(run.path / "metrics.jsonl"), completed)
        changed = found != self.metrics
        self.metrics = found
        return changed

    def _look_at_others(self) -> bool:
        found: dict[str, dict[str, object]] = {}
        for name in self._followed:
            run = self._store.known(name)
            found[name] = {} if run is None else _others(run)
        changed = found != self.others
        self.others = found
        return changed

    async def _look_at_list(self) -> bool:
        new, self._cost = await asyncio.to_thread(self._timed_list)
        lines, changed = {}, len(new) != len(self.lines)
        for name, line in new.items():
            count, old = self.lines.get(name, (0, {}))
            if line != old:
                count, changed = count + 1, True
            lines[name] = (count, line)
        self.lines = lines
        return changed

    def _timed_list(self) -> tuple[dict[str, dict[str, Any]], float]:
        """The list, and the processor time that it took."""
        began = time.thread_time()
        return self._store.runs(), time.thread_time() - began


def _others(run: Found) -> dict[str, object]:
    return {name: _state(run.path / name) for name in _OTHERS}


def _state(path: Path) -> object:
    """What changes when a file does, or a folder gets another entry."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


@dataclass
class _Followed:
    """One run that a stream follows."""

    name: str
    tail: Tail
    others: dict[str, object]
    completed: int = 0
    metrics: object = None


async def watch_events(
    store: RunStore, watcher: Watcher, runs: Sequence[Found], after: Sequence[int] | None
) -> AsyncIterator[bytes]:
    """The events of runs, as they are sent; see `fornax.dashboard.api`.

    Args:
      after: the offset behind which the lines of each run are wanted; None: those to come.
    """
    with watcher.follow([run.id for run in runs]):
        followed = [_begin(store, run, after[n] if after else None) for n, run in enumerate(runs)]
        seen = {name: count for name, (count, _) in watcher.lines.items()}
        known = bool(watcher.lines)
        yield b"retry: 1000\n: hello\n\n"
        while not watcher.closed:
            said, change = False, watcher.next_change
            for each in followed:
                async for event in _of_run(store, watcher, each):
                    said = True
                    yield _sent(followed, event)
            if watcher.lines and known and watcher.lines.keys() != seen.keys():
                said = True
                yield _sent(followed, ("runs", {}))
            for name, (count, line) in watcher.lines.items():
                if known and name in seen and seen[name] != count:
                    said = True
                    line = {key: value for key, value in line.items() if key != "config"}
                    yield _sent(followed, ("run", {"run": line}))
            seen = {name: count for name, (count, _) in watcher.lines.items()}
            known = known or bool(watcher.lines)
            if not said:
                yield b": quiet\n\n"
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(change.wait(), _QUIET)


def _begin(store: RunStore, run: Found, offset: int | None) -> _Followed:
    path = run.path / "metrics.jsonl"
    if offset is None:
        offset = store.end_of_lines(path)
    tail = Tail(store.folder, path, offset)
    return _Followed(run.id, tail, _others(run))


async def _of_run(
    store: RunStore, watcher: Watcher, each: _Followed
) -> AsyncIterator[tuple[str, object]]:
    metrics = watcher.metrics.get(each.name)
    while metrics != each.metrics or metrics is None:
        chunk = each.tail.read(_AT_ONCE)
        if chunk.restarted:
            yield "reset", {"run": each.name, "why": "gone" if chunk.gone else "rewritten"}
        records = each.tail.records(chunk)
        for begin in range(0, len(records), _MOST_RECORDS):
            part = records[begin : begin + _MOST_RECORDS]
            yield "lines", {"run": each.name, "records": part, "offset": each.tail.offset}
        if not chunk.more:
            each.metrics = metrics
            break
        await asyncio.sleep(0)
    completed = store.numbers.completed.get(each.name, 0)
    if completed != each.completed:
        each.completed = completed
        yield "complete", {"run": each.name}
    others = watcher.others.get(each.name)
    if others and others != each.others:
        changed = [name for name in others if others[name] != each.others.get(name)]
        each.others = others
        yield "changed", {"run": each.name, "files": changed}


def _sent(followed: Sequence[_Followed], event: tuple[str, object]) -> bytes:
    kind, data = event
    offsets = ",".join(str(each.tail.offset) for each in followed).encode()
    return b"id: %b\nevent: %b\ndata: %b\n\n" % (offsets, kind.encode(), encode(data))
