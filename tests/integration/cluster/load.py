"""How much longer a launched run takes here than on the machine that its limits are of."""

import os
import statistics
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType

__all__ = ["OtherLoad", "pace"]

_SAMPLE_SECONDS = 0.2
_MOST = 0.9
_TICKS = os.sysconf("SC_CLK_TCK")
_COUNT, _SECONDS = 2_000_000, 0.045
"""How far a core of the machine that the limits are of counts in these seconds (CPython 3.11)."""


def pace() -> float:
    """How many times as long a core of this machine takes for Python; 1 for one that is faster.

    Most of what a group does to form again is Python: imports, and the tracing of the step.
    """
    found = []
    for _ in range(9):
        began = time.thread_time()
        total = 0
        for number in range(_COUNT):
            total += number
        found.append(time.thread_time() - began)
    return max(1.0, statistics.median(found) / _SECONDS)


class OtherLoad:
    """Within the block, a thread adds up the processor time of all programs but a run's."""

    def __init__(self, own: Callable[[], Iterable[int]]) -> None:
        """Count nothing yet.

        Args:
          own: the processes of the run.
        """
        self._own = own
        self._samples: list[tuple[float, float]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> "OtherLoad":
        """Begin."""
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End."""
        self._ended.set()
        self._thread.join()

    def slowdown(self, seconds: float) -> float:
        """How many times as long the run took for what it did in the latest so many seconds.

        Of a machine of which others take the share s, a run has 1 - s, so that what it computes
        takes 1 / (1 - s) as long.
        """
        since = time.monotonic() - seconds
        samples = [each for each in self._samples if each[0] >= since - _SAMPLE_SECONDS]
        (began, before), (ended, after) = samples[0], samples[-1]
        share = (after - before) / (os.cpu_count() or 1) / max(ended - began, _SAMPLE_SECONDS)
        return 1 / (1 - min(max(share, 0.0), _MOST))

    def _sample(self) -> None:
        used: dict[int, float] = {}
        own = 0.0
        while True:
            for pid in (*self._own(), os.getpid()):
                now = _used(pid)
                own += max(0.0, now - used.get(pid, 0.0))
                used[pid] = max(now, used.get(pid, 0.0))
            self._samples.append((time.monotonic(), _all_used() - own))
            if self._ended.wait(_SAMPLE_SECONDS):
                return


def _all_used() -> float:
    """Processor seconds that all programs have used since the machine started."""
    user, nice, system, _, _, *rest = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    return sum(map(int, (user, nice, system, *rest))) / _TICKS


def _used(pid: int) -> float:
    """And a process; 0 for one that has ended."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(words[11]) + int(words[12])) / _TICKS
