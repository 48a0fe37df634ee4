"""The list of runs as it is now, from what was read of each since it changed."""

import dataclasses
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fornax.dashboard.alerts import of_disk, of_metrics, of_silence
from fornax.dashboard.folder import Folder
from fornax.dashboard.lines import HUGE
from fornax.dashboard.numbers import LIMIT_BYTES, NumbersCache
from fornax.dashboard.runs import Found, Locks, Summary, discover, summarise

__all__ = ["RunStore"]

_LOOK_SECONDS = 0.5
_RECENT = 120.0
_LAST_BYTES = 64 << 10
_MOST_CHECKPOINT_FILES = 2000


class RunStore:
    """The runs of a folder. Methods may be called from any thread."""

    def __init__(self, folder: Folder, limit_bytes: int = LIMIT_BYTES) -> None:
        """Nothing is looked at yet; see `NumbersCache` for the limit."""
        self.folder = folder
        self.numbers = NumbersCache(folder, limit_bytes)
        self.truncated = False
        """Whether there are more runs than are listed."""
        self._known: dict[str, _Known] = {}
        self._checkpoints: dict[tuple[str, float], int] = {}
        self._looked = float("-inf")
        self._lock = threading.Lock()

    def close(self) -> None:
        """End its thread."""
        self.numbers.close()

    def look(self, *, again: bool = False) -> None:
        """Look for runs again, unless that was done half a second ago; or in any case."""
        with self._lock:
            if not again and time.monotonic() - self._looked < _LOOK_SECONDS:
                return
            runs, self.truncated = discover(self.folder)
            locks, known = Locks(), {}
            for run in runs:
                known[run.id] = self._look_at(run, locks)
            self._known = known  # at once: others read it meanwhile
            self._looked = time.monotonic()
        self.numbers.forget(known.__contains__)

    def _look_at(self, run: Found, locks: Locks) -> "_Known":
        """What is known of a run, read again where it may be another."""
        locked = (run.lock, locks.holds(run.lock[1] if run.lock else None))
        recent = time.time() - run.updated < _RECENT  # then whether it runs may change by itself
        key = (run.files, locked, locks.holds(run.launch_lock), run.traceback,
               recent and time.time() // 10)  # fmt: skip
        before = self._known.get(run.id)
        if before is not None and before.key == key:
            return before
        return _Known(run, key, summarise(self.folder, run, locks))

    def find(self, name: str) -> Found | None:
        """A run by its name; one that has just come is looked for."""
        if name not in self._known:
            below = (f"{self.folder.root}/{name}", f"{os.path.dirname(self.folder.root)}/{name}")
            places = map(self.folder.resolve, below)
            self.look(again=any(place is not None and os.path.isdir(place) for place in places))
        return self.known(name)

    def known(self, name: str) -> Found | None:
        """A run by its name, as it was when it was last looked for."""
        found = self._known.get(name)
        return None if found is None else found.run

    def summary(self, name: str) -> Summary:
        """What the files of a run say of it; KeyError for one that is not there."""
        return self._known[name].summary

    def end_of_lines(self, path: Path) -> int:
        """The byte behind the last whole line of a file; 0 where it has none."""
        try:
            descriptor = self.folder.open(path)
        except OSError:
            return 0
        try:
            size = os.fstat(descriptor).st_size
            for most in (_LAST_BYTES, HUGE):
                begin = max(0, size - most)
                end = os.pread(descriptor, size - begin, begin).rfind(b"\n") + 1
                if end:
                    return begin + end
        except OSError:
            pass
        finally:
            os.close(descriptor)
        return 0

    def runs(self) -> dict[str, dict[str, Any]]:
        """The lines of the list by name, as JSON."""
        self.look()
        return {name: self._line(known) for name, known in self._known.items()}

    def line(self, name: str) -> dict[str, Any]:
        """A run's line in the list; KeyError for one that is not there."""
        return self._line(self._known[name])

    def _line(self, known: "_Known") -> dict[str, Any]:
        run, summary, name = known.run, known.summary, known.run.id
        group, _, last = name.rpartition("/")
        return {
            "id": name,
            "name": last,
            "group": group,
            "kind": summary.kind,
            "method": summary.method,
            "status": summary.status,
            "step": summary.step,
            "steps": summary.steps,
            "started": summary.started,
            "updated": run.updated or None,
            "hosts": summary.hosts,
            "metrics": summary.metrics,
            "config": summary.config,
            "alerts": [dataclasses.asdict(alert) for alert in self._alerts(run, summary)],
        }

    def _alerts(self, run: Found, summary: Summary) -> Iterator[Any]:
        numbers = self.numbers.known(run.id)
        if numbers is None:
            yield from summary.alerts
        else:
            yield from of_metrics(numbers.table, numbers.spikes)
            yield from (alert for alert in summary.alerts if alert.kind == "fault")
        if summary.status != "running":
            return
        silent = of_silence(run.updated, summary.times, time.time(), summary.step)
        free, total = self.disk()
        full = of_disk(free, total, self._checkpoint_bytes(run)) if total else None
        yield from (alert for alert in (silent, full) if alert is not None)

    def disk(self) -> tuple[int, int]:
        """Free and all bytes of the disk of the runs."""
        try:
            found = shutil.disk_usage(self.folder.root)
        except OSError:
            return 0, 0
        return found.free, found.total

    def _checkpoint_bytes(self, run: Found) -> int:
        """Of the newest checkpoint of a run; 0 where it has none."""
        return next((row["bytes"] for row in self.checkpoints(run, newest=1)), 0)

    def checkpoints(self, run: Found, newest: int = 1000) -> list[dict[str, Any]]:
        """The newest checkpoints of a run that are whole, the last step first."""
        rows = []
        for name in sorted(checkpoint_steps(run), key=int, reverse=True):
            path = run.path / "checkpoints" / name
            record = self.folder.stat(path / "fornax.0.json")
            if record is None:
                continue
            key = (str(path), record.st_mtime)  # what is whole does not grow
            if key not in self._checkpoints:
                self._checkpoints[key] = folder_bytes(self.folder, path)
            row = {"step": int(name), "bytes": self._checkpoints[key], "modified": record.st_mtime}
            rows.append(row)
            if len(rows) == newest:
                break
        return rows


@dataclasses.dataclass(frozen=True)
class _Known:
    """A run, what it was read at, and what was read."""

    run: Found
    key: object
    summary: Summary


def checkpoint_steps(run: Found) -> list[str]:
    """The names of the folders of a run's checkpoints."""
    try:
        names = os.listdir(run.path / "checkpoints")
    except OSError:
        return []
    return [name for name in names if name.isascii() and name.isdecimal() and len(name) < 16]


def folder_bytes(folder: Folder, path: os.PathLike[str]) -> int:
    """Bytes of the files of a folder, of at most some thousands; links are not followed."""
    total = count = 0
    if folder.resolve(str(path)) is None:
        return 0
    for parent, _, names in os.walk(path):
        for name in names:
            count += 1
            try:
                total += os.lstat(os.path.join(parent, name)).st_size
            except OSError:
                continue
        if count > _MOST_CHECKPOINT_FILES:
            break
    return total
