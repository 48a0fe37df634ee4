"""What a server's process needs: signals in the event loop, memory given back."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

from fornax.config.host_memory import trim_heap

__all__ = ["give_back_memory", "resident_bytes", "signals"]

_STOPS = (signal.SIGTERM, signal.SIGINT)


@contextlib.contextmanager
def signals(stop: Callable[[], None], reread: Callable[[], None]) -> Iterator[None]:
    """Call `stop` on SIGTERM and SIGINT, `reread` on SIGHUP, in the running loop."""
    loop = asyncio.get_running_loop()
    for number in _STOPS:
        loop.add_signal_handler(number, stop)
    loop.add_signal_handler(signal.SIGHUP, reread)
    try:
        yield
    finally:
        for number in (*_STOPS, signal.SIGHUP):
            loop.remove_signal_handler(number)


_STATM = Path("/proc/self/statm")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_WORTH = 32 * 2**20
"""Bytes above the least that was ever held for which it is asked again."""


def resident_bytes() -> int:
    """What the process holds of the machine's memory; 0 where the system does not say."""
    if not _STATM.exists():
        return 0
    return int(_STATM.read_text().split()[1]) * _PAGE


async def give_back_memory(answered: Callable[[], int | None], *, seconds: float = 5.0) -> None:
    """Until cancelled: give back, at an interval in seconds, what a burst of requests left with the
    C library's allocator, unless requests run.

    glibc keeps freed memory for the next request, hundreds of megabytes after a burst of large
    ones. It is asked to free memory only while nothing runs, since what allocates meanwhile waits;
    and twice, since libraries below may hold messages of a request for a moment after its answer.

    Args:
      answered: how many requests have had their answer; none while one waits for it.
      seconds: between two looks.
    """
    lowest, before, asks = None, -1, 0
    while True:
        await asyncio.sleep(seconds)
        if (now := answered()) is None:
            continue
        if now != before:
            before, asks = now, 2
        if asks and (lowest is None or resident_bytes() > lowest + _WORTH):
            if not await asyncio.to_thread(trim_heap):
                return
            asks -= 1
            held = resident_bytes()
            lowest = held if lowest is None else min(lowest, held)
