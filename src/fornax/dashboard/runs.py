"""The runs below a folder: what makes a directory one, of which kind, how it fares."""

import math
import os
import socket
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fornax.dashboard.alerts import Alert, SpikeWatch, of_events, of_metrics
from fornax.dashboard.configs import flat_config
from fornax.dashboard.folder import Folder
from fornax.dashboard.lines import last_lines, parse
from fornax.dashboard.series import Table

__all__ = ["LAST_BYTES", "Found", "Kind", "Locks", "Status", "Summary", "discover", "summarise"]

Kind = Literal["train", "tune", "serve", "host", "quantize", "cluster", "unknown"]
Status = Literal["running", "finished", "stopped", "failed", "unknown"]

MARKS = ("metrics.jsonl", "goodput.jsonl", "events.jsonl", "server.jsonl", "samples.jsonl")
"""Files that are appended to, each of which makes a directory a run; as does
`quantization_report.json`."""
_MARKS = frozenset((*MARKS, "quantization_report.json"))
_WATCHED = frozenset((*_MARKS, "config.yaml", "spikes.jsonl", "program.json", "plan.json", ".lock"))
_NO_RUNS = frozenset(
    ("checkpoints", "tensorboard", "cluster", "profile", "requests", "images", "data", "stages")
)
"""Folders of a run that hold no others."""
_DEEPEST, _MOST_RUNS, _MOST_FOLDERS = 6, 5000, 20_000
LAST_BYTES = 32 << 10
_MOST_CONFIG = 1 << 20
_RECENT = 60.0
"""Seconds after which a run that no lock tells of is not running."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """A directory that is a run."""

    id: str
    path: Path
    files: Mapping[str, tuple[int, int]]
    """Size and time of change, in nanoseconds, of the files that say how it fares."""
    lock: tuple[int, int] | None
    """Device and inode of its lock."""
    launch_lock: int | None
    """Inode of the lock of the launch that it belongs to."""
    traceback: float
    """When the newest traceback was written; 0 for none."""

    @property
    def updated(self) -> float:
        """When a file of it changed last, in seconds since 1970."""
        return max((at for _, at in self.files.values()), default=0) / 1e9


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What the files of a run say of it, for the list."""

    kind: Kind
    method: str | None
    status: Status
    step: int | None
    steps: int | None
    started: float | None
    metrics: Mapping[str, float | None]
    """The last value of each."""
    config: Mapping[str, Any]
    alerts: Sequence[Alert]
    """Of the last records and events."""
    times: np.ndarray
    """Of the last records."""
    hosts: int = 1


class Locks:
    """The kernel's locks on files, looked at without taking one: a probe that takes a run's lock
    would keep the run itself from starting."""

    def __init__(self) -> None:
        """Those there are now."""
        self._held: set[int] = set()
        self.known = True
        """Whether the kernel tells."""
        try:
            lines = Path("/proc/locks").read_text().splitlines()
        except OSError:
            self.known = False
            return
        for line in lines:
            words = line.split()
            if "FLOCK" in words and "WRITE" in words:
                place = next((word for word in words if word.count(":") == 2), "")
                self._held.add(int(place.rpartition(":")[2] or 0))

    def holds(self, inode: int | None) -> bool:
        """Whether somebody holds the lock of a file."""
        return inode is not None and inode in self._held


def discover(folder: Folder) -> tuple[list[Found], bool]:
    """The runs, by name, and whether there are more than are listed.

    The folder may be a run itself: names then begin with its own.
    """
    found: list[Found] = []
    seen: set[tuple[int, int]] = set()
    folders = 0
    root = Path(folder.root)
    waiting = [(root, "", 0)]
    while waiting:
        path, name, depth = waiting.pop()
        folders += 1
        if folders > _MOST_FOLDERS or len(found) >= _MOST_RUNS:
            return sorted(found, key=lambda run: run.id), True
        try:
            with os.scandir(path) as entries:
                run, below = _look(folder, path, name, list(entries), seen)
        except OSError:  # it went, or is not ours to read
            continue
        if run is not None:
            found.append(run)
        if depth < _DEEPEST:
            waiting += [
                (path / each, f"{name}/{each}" if name else each, depth + 1) for each in below
            ]
    if any(run.id == "" for run in found):
        found = [replace(run, id=f"{root.name}/{run.id}".rstrip("/")) for run in found]
    return sorted(found, key=lambda run: run.id), False


def _look(
    folder: Folder,
    path: Path,
    name: str,
    entries: list[os.DirEntry[str]],
    seen: set[tuple[int, int]],
) -> tuple[Found | None, list[str]]:
    """The run that a directory is, if it is one, and the names of those below it to look into."""
    here = os.stat(path)
    if (here.st_dev, here.st_ino) in seen:  # links may lead in a circle
        return None, []
    seen.add((here.st_dev, here.st_ino))
    files: dict[str, tuple[int, int]] = {}
    below: list[str] = []
    lock: tuple[int, int] | None = None
    launch: int | None = None
    traceback = 0.0
    for entry in entries:
        if entry.name in _WATCHED:
            if (found := _stat(folder, entry)) is not None and stat.S_ISREG(found.st_mode):
                files[entry.name] = (found.st_size, found.st_mtime_ns)
                lock = (found.st_dev, found.st_ino) if entry.name == ".lock" else lock
        elif entry.name == "cluster":
            launch = _inode(path / "cluster" / ".lock")
        elif entry.name.startswith("traceback-"):
            if (found := _stat(folder, entry)) is not None:
                traceback = max(traceback, found.st_mtime)
        elif not entry.name.startswith(".") and entry.name not in _NO_RUNS and _named(entry.name):
            inside = not entry.is_symlink() or folder.resolve(entry.path) is not None
            if entry.is_dir() and inside:
                below.append(entry.name)
    files.pop(".lock", None)
    if not _MARKS & files.keys():
        return None, below
    run = Found(
        id=name,
        path=path,
        files=files,
        lock=lock,
        launch_lock=launch,
        traceback=traceback,
    )
    return run, below


def _stat(folder: Folder, entry: os.DirEntry[str]) -> os.stat_result | None:
    try:
        if entry.is_symlink():
            return folder.stat(entry.path)
        return entry.stat(follow_symlinks=False)
    except OSError:
        return None


def _inode(path: Path) -> int | None:
    try:
        return os.lstat(path).st_ino
    except OSError:
        return None


def _named(name: str) -> bool:
    """Whether a name is text that JSON and addresses can say."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def summarise(folder: Folder, run: Found, locks: Locks) -> Summary:
    """Read what the list says of a run: a config, and the ends of a few files."""
    text = folder.text(run.path / "config.yaml", _MOST_CONFIG) if "config.yaml" in run.files else ""
    config = flat_config(text or "")
    recent = _last(folder, run, "metrics.jsonl")
    events = _last(folder, run, "events.jsonl")
    server = _last(folder, run, "server.jsonl") if "server.jsonl" in run.files else []
    kind, method = _kind(run, config, server)
    table, spikes = Table(), SpikeWatch()
    table.append(recent or server)
    spikes.look(table)
    metrics = {name: value if math.isfinite(value) else None for name, value in table.last()}
    metrics.pop("time", None)
    step = _whole(metrics.pop("step", None))
    steps = _whole(config.get("steps"))
    return Summary(
        kind=kind,
        method=method,
        status=_status(folder, run, locks, step, steps, events, server),
        step=step,
        steps=steps,
        started=_started(folder, run),
        metrics=metrics,
        config=config,
        alerts=(*of_metrics(table, spikes), *of_events(events)),
        times=table.values("time").copy(),
        hosts=next((int(e["hosts"]) for e in reversed(events) if _is_count(e.get("hosts"))), 1),
    )


def _last(folder: Folder, run: Found, name: str) -> list[dict[str, Any]]:
    return last_lines(folder, run.path / name, LAST_BYTES) if name in run.files else []


def _whole(value: object) -> int | None:
    return int(value) if isinstance(value, float | int) and abs(value) < 2**53 else None


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _kind(
    run: Found, config: Mapping[str, Any], server: list[dict[str, Any]]
) -> tuple[Kind, str | None]:
    if "quantization_report.json" in run.files:
        return "quantize", None
    if server and "metrics.jsonl" not in run.files:
        host = any(record.get("kind") == "host" for record in server)
        return ("host" if host else "serve"), None
    if isinstance(config.get("model"), str):
        return "tune", _method(config)
    if config or "metrics.jsonl" in run.files:
        return "train", "pretrain" if "seq_len" in config else None
    return ("cluster" if "events.jsonl" in run.files else "unknown"), None


_METHODS: tuple[tuple[str, str], ...] = (
    ("desirable_weight", "kto"),
    ("divergence", "distill"),
    ("value_coefficient", "ppo"),
    ("neftune_alpha", "sft"),
)
"""A key that only the config of this method has."""


def _method(config: Mapping[str, Any]) -> str | None:
    """The method of `fornax tune`, or its variant where the config names one."""
    for key in ("algorithm.type", "loss.type"):
        if isinstance(config.get(key), str):
            return config[key]
    return next((method for key, method in _METHODS if key in config), None)


def _status(
    folder: Folder,
    run: Found,
    locks: Locks,
    step: int | None,
    steps: int | None,
    events: list[dict[str, Any]],
    server: list[dict[str, Any]],
) -> Status:
    if locks.holds(run.lock[1] if run.lock else None) or locks.holds(run.launch_lock):
        return "running"
    if "quantization_report.json" in run.files:
        return "finished"
    if server and "stopped" in server[-1]:
        return "stopped"
    ended = next((e for e in reversed(events) if "state" in e), {})
    if ended.get("state") == "ended" and ended.get("code"):
        return "stopped" if ended["code"] in (130, 143) else "failed"
    if step is not None and steps is not None and step >= steps:
        return "finished"
    if run.traceback and run.traceback >= run.updated - 1:
        return "failed"
    if time.time() - run.updated < _RECENT and not _lock_tells(folder, run, locks):
        return "running"
    return "stopped" if step is not None or server else "unknown"


def _lock_tells(folder: Folder, run: Found, locks: Locks) -> bool:
    """Whether a lock that nobody holds means that nobody works on the run: of a process of this
    machine, where the kernel tells."""
    if not locks.known or run.lock is None:
        return False
    owner = folder.text(run.path / ".lock", 400) or ""
    return owner.endswith(f" on {socket.gethostname()}")


def _started(folder: Folder, run: Found) -> float | None:
    """The time of the first record that has one."""
    for name in ("goodput.jsonl", "events.jsonl", "server.jsonl", "metrics.jsonl"):
        if name in run.files:
            for time_ in _times(folder, run.path / name):
                return time_
    return None


def _times(folder: Folder, path: Path) -> Iterator[float]:
    try:
        data = folder.read(path, 4096)
    except OSError:
        return
    for record in parse(data[: data.rfind(b"\n") + 1])[0]:
        if isinstance(record.get("time"), float | int):
            yield float(record["time"])
