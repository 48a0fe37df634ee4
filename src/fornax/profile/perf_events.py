"""Hardware counters of this process's CPUs by `perf_event_open(2)`, in user mode.

Each thread has a descriptor an event; threads and processes that these begin are counted with them.
"""

import ctypes
import errno
import os
import resource
import struct
import threading
from collections.abc import Callable
from pathlib import Path

__all__ = ["PerfEvents"]

_EVENTS = {
    # name: type and number, as `linux/perf_event.h` has them
    "cycles": (0, 0),
    "instructions": (0, 1),
    "cache misses": (0, 3),
    "branch misses": (0, 5),
    "page faults": (1, 2),
}
_CALL = {"x86_64": 298, "aarch64": 241}
_SIZE = 64
"""Of the first version of `perf_event_attr`."""
_TIMES = 3
"""Read with each count the time that it was wanted and the time that it counted."""
_INHERIT, _EXCLUDE_KERNEL, _EXCLUDE_HYPERVISOR = 1 << 1, 1 << 5, 1 << 6
_CLOSE_ON_EXEC = 1 << 3
_TASKS = Path("/proc/self/task")


class PerfEvents:
    """Counts from now on until `close`, over all threads."""

    def __init__(self) -> None:
        """Opens what the machine gives; `absent` says of all else why not."""
        self.names: tuple[str, ...] = ()
        self.absent: dict[str, str] = {}
        self._open: dict[str, list[int]] = {}
        self._turn = threading.Lock()
        system = os.uname()
        call = _CALL.get(system.machine)
        if call is None or not _TASKS.is_dir():
            where = f"{system.sysname} on {system.machine}"
            self.absent = dict.fromkeys(_EVENTS, f"they are not read on {where}")
            return
        threads = [int(each.name) for each in _TASKS.iterdir()]
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        free = limit - len(os.listdir("/proc/self/fd"))
        if limit != resource.RLIM_INFINITY and 2 * len(threads) * len(_EVENTS) > free:
            self.absent = dict.fromkeys(
                _EVENTS,
                f"{len(threads)} threads would take more than half of the {free} files that the "
                "process may still open (ulimit -n)",
            )
            return
        library = ctypes.CDLL(None, use_errno=True)
        for name, event in _EVENTS.items():
            opened = [_open(library.syscall, call, *event, thread) for thread in threads]
            files = [file for file, _ in opened if file >= 0]
            if files:
                self._open[name] = files
            else:
                self.absent[name] = _reason(opened[0][1])
        self.names = tuple(self._open)

    def read(self) -> list[float]:
        """Counts so far, in the order of `names`; nothing once closed. Where a CPU counts fewer
        events at once than were asked for, they are scaled by the time that each was counted."""
        with self._turn:
            return [sum(map(_count, files)) for files in self._open.values()]

    def close(self) -> None:
        """Count no more."""
        with self._turn:
            for file in (file for files in self._open.values() for file in files):
                os.close(file)
            self._open = {}


def _open(
    syscall: Callable[..., int], call: int, kind: int, event: int, thread: int
) -> tuple[int, int]:
    """A descriptor, or -1 and why."""
    flags = _INHERIT | _EXCLUDE_KERNEL | _EXCLUDE_HYPERVISOR
    asked = struct.pack("<IIQQQQQ", kind, _SIZE, event, 0, 0, _TIMES, flags).ljust(_SIZE, b"\0")
    file = syscall(call, asked, thread, -1, -1, _CLOSE_ON_EXEC)
    return file, ctypes.get_errno() if file < 0 else 0


def _count(file: int) -> float:
    count, wanted, counted = struct.unpack("<QQQ", os.read(file, 24))
    return count * wanted / counted if counted else float(count)


def _reason(number: int) -> str:
    if number in (errno.EACCES, errno.EPERM):
        setting = Path("/proc/sys/kernel/perf_event_paranoid")
        level = setting.read_text(encoding="ascii").strip() if setting.is_file() else "not there"
        return f"perf_event_open is not permitted ({setting} is {level}; 2 or less lets it be)"
    if number in (errno.ENOENT, errno.ENODEV, errno.EOPNOTSUPP):
        return "the processor has none, or the virtual machine passes none on"
    return f"perf_event_open: {os.strerror(number)}"
