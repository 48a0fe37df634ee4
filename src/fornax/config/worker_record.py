"""What a worker of a launched run is doing, in a small memory-mapped file that others read.

The worker writes 96 bytes at each change of phase or step, and a thread of it stamps the time four
times a second. The process that watches the worker reads the file, without the worker's help: it
says where a process stands that is stopped, that hangs, or that is gone.

Layout, little-endian, 208 bytes:

    0   4s  b"FXW3"
    4   u32 hosts; 8 rank; 12 epoch; 16 process id
    24  u64 count of changes, written before the rest of a change and at 112 again after it; a
        reader takes 112, the rest, then 24, and reads again when they are unequal
    32  i64 step that is worked on, or was done last
    40  16s phase
    56  i64 wall time, ns, of the last change
    64  i64 monotonic time, ns, of the last change
    72  i64 step that the worker last entered
    80  i64 monotonic time, ns, at which it did: later than its peers' is how late it was
    88  i64 ns that the worker had spent by then, in all steps, waiting for data
    96  i64 ns that it had spent in its own code, outside the devices' programs
    104 i64 ns of processor time that its threads had used while those programs ran
    120 i64 monotonic time, ns, of the heartbeat
    128 u64 1 while a program of the devices runs, whose collectives wait for the other workers
    136 i64 step after which a checkpoint last had no room on the disk, + 1; 0 for none
    144 u64 set from outside: 1 once the worker is asked to keep its last step in memory only, 2
        once its group is to be left, as another worker is gone
    152 i64 that step, once it is kept, + 1; 0 for none
    160 i64 number of the batch of the step at 32, + 1; 0 for none
    168 i64 index in its source of the record of data that a function of the user's has, + 1; 0
        while none has one
    176 32s name of that record's part of a mixture, cut off where it is longer
"""

import contextlib
import functools
import mmap
import os
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fornax.config import environment
from fornax.config.errors import ClusterError

__all__ = [
    "HEARTBEAT_SECONDS",
    "RecordReader",
    "WorkerRecord",
    "WorkerState",
    "ask_to_keep",
    "ask_to_leave",
    "create",
    "current",
    "is_written_by",
    "opened",
    "read",
    "renew",
]

HEARTBEAT_SECONDS = 0.25

_ATTEMPTS = 1000
_MAGIC = b"FXW3"
_SIZE = 208
_HEAD = struct.Struct("<4sIIII")
_PID = struct.Struct("<I")
_PID_AT = 16
_COUNT = struct.Struct("<Q")
_CHANGE = struct.Struct("<q16sqqqqqqq")
_BEAT = struct.Struct("<q")
_FLAG = struct.Struct("<Q")
_REST = struct.Struct("<qQqQqqq32s")
_BEFORE, _FIRST, _AFTER, _BEAT_AT, _PROGRAM_AT, _UNSAVED_AT = 24, 32, 112, 120, 128, 136
_ASKED_AT, _KEPT_AT, _BATCH_AT, _RECORD_AT, _PART_AT = 144, 152, 160, 168, 176
_PART_BYTES = 32
_KEEP, _LEAVE = 1, 2


@dataclass(frozen=True, kw_only=True)
class WorkerState:
    """A record as it was read; times are nanoseconds, monotonic ones of the worker's host."""

    rank: int
    hosts: int
    epoch: int
    pid: int
    step: int
    """The step that is worked on; -1 before the first is known."""
    phase: str
    """What the worker does: a category of the goodput ledger, `start` or `exit`."""
    changed_at: float
    """Wall time of the last change, seconds since 1970."""
    changed_ns: int
    entered_step: int
    """The step whose program the worker started last; -1 for none."""
    entered_ns: int
    data_ns: int
    """Spent waiting for data in all steps, up to that entry."""
    code_ns: int
    """Spent in the worker's own code in the steps, outside the devices' programs."""
    busy_ns: int
    """Processor time of all threads while those programs ran."""
    beat_ns: int
    in_program: bool
    """Whether a program of the devices runs, whose collectives wait for the other workers."""
    unsaved: int
    """The step after which a checkpoint last had no room on the disk; -1 for none."""
    kept: int
    """The step after which the worker stopped, kept in memory only; -1 for none."""
    batch: int
    """The number of the step's batch, from 0, as in `data.skip_steps`; -1 where none is known."""
    record: int
    """The index in its source of the record that a function of the user's transforms, maybe for a
    later batch; -1 while it has none."""
    part: str
    """The name of that record's part of a mixture."""


class WorkerRecord:
    """The worker's side: the trainer's ledger calls `change`, a thread stamps the heartbeat."""

    def __init__(self, path: Path) -> None:
        """Map the file that `create` made, and start the heartbeat.

        Raises:
          ClusterError: when there is none.
        """
        try:
            with path.open("r+b") as file:
                self._map = mmap.mmap(file.fileno(), _SIZE)
        except (OSError, ValueError) as error:
            raise ClusterError(
                f"{path} is not a record of a worker ({error}); FORNAX_WORKER_RECORD is for "
                "fornax launch to set: unset it"
            ) from error
        self._count = 0
        self._closed = threading.Event()
        self._entered, self._entered_ns = -1, 0
        self._phase, self._since = "start", 0
        self.step = -1
        """The step that it says is worked on."""
        self._data_ns = self._code_ns = self._busy_ns = 0
        self._spent = 0, 0, 0
        self.change("start", -1)
        self._beat()
        self._map[_PID_AT : _PID_AT + _PID.size] = _PID.pack(os.getpid())
        threading.Thread(target=self._beat_on, name="worker-record", daemon=True).start()

    def change(self, phase: str, step: int) -> None:
        """Say what is done now, and at which step; under a microsecond.

        Entering the phase `step` counts as starting that step's program: on a CPU its collectives
        block the call, so this must come before.
        """
        now = time.monotonic_ns()
        self._count += 1
        if self._phase == "step":
            self._code_ns += now - self._since
        elif self._phase == "wait_for_data":
            self._data_ns += now - self._since
        self._phase, self._since, self.step = phase, now, step
        if phase == "step" and step != self._entered:
            self._entered, self._entered_ns = step, now
            self._spent = self._data_ns, self._code_ns, self._busy_ns
        at = self._entered, self._entered_ns
        change = _CHANGE.pack(step, phase.encode(), time.time_ns(), now, *at, *self._spent)
        _put(self._map, self._count, change)

    @contextlib.contextmanager
    def program(self) -> Iterator[None]:
        """Within the block, in phase `step`, a program of the devices runs.

        Its collectives wait for the other workers, so of its time only what this worker's
        processors work counts as the worker's own; two microseconds.
        """
        began, busy = time.monotonic_ns(), time.process_time_ns()
        self._map[_PROGRAM_AT : _PROGRAM_AT + _FLAG.size] = _FLAG.pack(1)
        try:
            yield
        finally:
            self._map[_PROGRAM_AT : _PROGRAM_AT + _FLAG.size] = _FLAG.pack(0)
            self._busy_ns += time.process_time_ns() - busy
            self._code_ns -= time.monotonic_ns() - began

    def set_unsaved(self, step: int) -> None:
        """Say that a checkpoint had no room, after a step."""
        self._map[_UNSAVED_AT : _UNSAVED_AT + _BEAT.size] = _BEAT.pack(step + 1)

    def is_asked_to_keep(self) -> bool:
        """Whether the step at which this worker is to stop need not be saved to disk."""
        return _FLAG.unpack_from(self._map, _ASKED_AT)[0] == _KEEP

    def is_asked_to_leave(self) -> bool:
        """Whether another worker is gone, so that waiting for it is pointless."""
        return _FLAG.unpack_from(self._map, _ASKED_AT)[0] == _LEAVE

    def set_kept(self, step: int) -> None:
        """Say that the state after a step is kept in memory only."""
        self._map[_KEPT_AT : _KEPT_AT + _BEAT.size] = _BEAT.pack(step + 1)

    def set_batch(self, number: int) -> None:
        """Say which batch the step is, from 0; -1 for none."""
        self._map[_BATCH_AT : _BATCH_AT + _BEAT.size] = _BEAT.pack(number + 1)

    def set_transformed(self, part: str, index: int) -> None:
        """Say which record of the data a function of the user's gets now; under a microsecond.

        Args:
          part: of a mixture.
          index: in the part's source; -1 once it is done.
        """
        name = part.encode()[:_PART_BYTES]
        self._map[_PART_AT : _PART_AT + _PART_BYTES] = name.ljust(_PART_BYTES, b"\0")
        self._map[_RECORD_AT : _RECORD_AT + _BEAT.size] = _BEAT.pack(index + 1)

    def _beat(self) -> None:
        self._map[_BEAT_AT : _BEAT_AT + _BEAT.size] = _BEAT.pack(time.monotonic_ns())

    def _beat_on(self) -> None:
        self._beat()
        while not self._closed.wait(HEARTBEAT_SECONDS):
            self._beat()

    def close(self) -> None:
        """No more heartbeats."""
        self._closed.set()


def _put(where: mmap.mmap | bytearray, count: int, change: bytes) -> None:
    """Write a change between its two counts; `pack_into` would show zeros meanwhile."""
    number = _COUNT.pack(count)
    where[_BEFORE:_FIRST] = number
    where[_FIRST:_AFTER] = change
    where[_AFTER:_BEAT_AT] = number


def renew() -> None:
    """Close this process's record: the next `current` is of the file that is there then."""
    record = current()
    if record is not None:
        record.close()
    current.cache_clear()


@functools.cache
def current() -> WorkerRecord | None:
    """The record of this process, where a launcher asked for one; the same until `renew`."""
    path = environment.worker_record()
    return None if path is None else WorkerRecord(path)


def opened() -> WorkerRecord | None:
    """The record of this process, if it has taken one up; its helpers have none of their own."""
    return current() if current.cache_info().currsize else None


def create(path: Path, *, rank: int, hosts: int, epoch: int) -> None:
    """Make the file of a worker that will be started; one that is there is replaced."""
    content = bytearray(_SIZE)
    _HEAD.pack_into(content, 0, _MAGIC, hosts, rank, epoch, 0)
    now = time.monotonic_ns()
    _put(content, 0, _CHANGE.pack(-1, b"start", time.time_ns(), now, -1, 0, 0, 0, 0))
    _BEAT.pack_into(content, _BEAT_AT, now)
    path.unlink(missing_ok=True)  # the worker of before may still have it mapped
    path.write_bytes(content)


def is_written_by(pid: int, path: Path) -> bool:
    """Whether a process is the one that writes a record, and not another of its number."""
    try:
        return str(path.resolve()) in Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return False


def ask_to_keep(path: Path) -> None:
    """Have a worker that is asked to stop keep its last step in memory, not on disk."""
    _ask(path, _KEEP)


def ask_to_leave(path: Path) -> None:
    """Have a worker leave its group: another of it is gone."""
    _ask(path, _LEAVE)


def _ask(path: Path, what: int) -> None:
    with path.open("r+b") as file:
        file.seek(_ASKED_AT)
        file.write(_FLAG.pack(what))


class RecordReader:
    """A record that is read again and again; it is that of the file that was there first."""

    def __init__(self, path: Path) -> None:
        """Map the file.

        Raises:
          OSError, ValueError: when there is none, or it is too short.
        """
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), _SIZE, prot=mmap.PROT_READ)

    def state(self) -> WorkerState | None:
        """What it says; None for a file that is not a record."""
        for _ in range(_ATTEMPTS):  # a worker killed in the middle leaves unequal counts
            after = self._map[_AFTER:_BEAT_AT]
            change = self._map[_FIRST:_AFTER]
            if self._map[_BEFORE:_FIRST] == after:
                break
        magic, hosts, rank, epoch, pid = _HEAD.unpack_from(self._map, 0)
        if magic != _MAGIC:
            return None
        beat, in_program, unsaved, _, kept, batch, index, part = _REST.unpack_from(
            self._map, _BEAT_AT
        )
        step, phase, wall_ns, changed_ns, entered, entered_ns, *spent = _CHANGE.unpack(change)
        return WorkerState(
            rank=rank,
            hosts=hosts,
            epoch=epoch,
            pid=pid,
            step=step,
            phase=phase.rstrip(b"\0").decode(),
            changed_at=wall_ns / 1e9,
            changed_ns=changed_ns,
            entered_step=entered,
            entered_ns=entered_ns,
            data_ns=spent[0],
            code_ns=spent[1],
            busy_ns=spent[2],
            beat_ns=beat,
            in_program=bool(in_program),
            unsaved=unsaved - 1,
            kept=kept - 1,
            batch=batch - 1,
            record=index - 1,
            part=part.rstrip(b"\0").decode(errors="ignore"),
        )

    def close(self) -> None:
        """Unmap it."""
        self._map.close()


def read(path: Path) -> WorkerState | None:
    """What a worker's record says; None when there is none."""
    try:
        reader = RecordReader(path)
    except (OSError, ValueError):
        return None
    try:
        return reader.state()
    finally:
        reader.close()
