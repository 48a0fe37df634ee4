"""What the kernel says of a process from outside: whether it is held, kept waiting, or ending."""

import contextlib
import os
import time
from pathlib import Path

from fornax.config.worker_record import WorkerState

__all__ = ["ProcessState", "is_stopped"]

_BYTES = 1024


class ProcessState:
    """A worker's process, where the system tells (Linux); its files are opened once."""

    def __init__(self, pid: int) -> None:
        """Look at process `pid` from now on."""
        self.stopped = 0.0
        """For how long the process has been held by SIGSTOP, in seconds."""
        self.ending: int | None = None
        """The exit code, minus the signal's number where one ends it, of a process whose main
        thread is gone while another, such as one that waits for a disk, is not yet."""
        self.taken = 0.0
        """Seconds, up to the step that it entered last, for which a program of the devices could
        not run: the process was held, or its main thread waited for a processor."""
        self._files = [_opened(f"/proc/{pid}/task/{pid}/{name}") for name in ("stat", "schedstat")]
        self.starved = 0.0
        """Seconds since the last heartbeat for which the main thread waited for a processor: it may
        hold Python's lock then, and has not hung."""
        self._beat, self._delay_at_beat = -1, 0.0
        self._taken = self._delay = 0.0
        self._entered = -1
        self._looked_at = time.monotonic()
        self._stopped_at: int | None = None

    def look(self, record: WorkerState | None) -> None:
        """Look at the process, many times a second; `record` is what it says by itself."""
        stat, schedule = map(_content, self._files)
        now, held = time.monotonic(), _is_held(stat)
        delay = int(schedule.split()[1]) / 1e9 if schedule else 0.0
        self.ending = _code_of_ending(stat)
        if not held:
            self._stopped_at = None
        elif self._stopped_at is None or (record and record.beat_ns > self._stopped_at):
            self._stopped_at = time.monotonic_ns()  # or it ran since, and was stopped again
        since = self._stopped_at
        self.stopped = 0.0 if since is None else max((time.monotonic_ns() - since) / 1e9, 1e-3)
        if record is not None:
            if record.beat_ns != self._beat:
                self._beat, self._delay_at_beat = record.beat_ns, delay
            self.starved = delay - self._delay_at_beat
            if record.in_program:
                self._taken += delay - self._delay + (now - self._looked_at if held else 0.0)
            if record.entered_step != self._entered:
                self._entered, self.taken = record.entered_step, self._taken
        self._looked_at, self._delay = now, delay

    def close(self) -> None:
        """Close the files."""
        while self._files:
            if (file := self._files.pop()) is not None:
                os.close(file)


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal, where the system tells (Linux)."""
    with contextlib.suppress(OSError):
        return _is_held(Path(f"/proc/{pid}/stat").read_bytes())
    return False


def _opened(path: str) -> int | None:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None


def _content(file: int | None) -> bytes:
    """What a file of /proc says now; nothing where there is none, or the process is gone."""
    try:
        return b"" if file is None else os.pread(file, _BYTES, 0)
    except OSError:
        return b""


def _code_of_ending(stat: bytes) -> int | None:
    state, *others = stat.rpartition(b")")[2].split() or [b""]
    if state not in (b"Z", b"X"):
        return None
    status = int(others[-1])  # as wait(2) gives it
    return -(status & 0x7F) if status & 0x7F else status >> 8


def _is_held(stat: bytes) -> bool:
    """Whether a line of /proc/PID/stat is that of a stopped process."""
    return stat.rpartition(b")")[2].lstrip()[:1] in (b"T", b"t")
