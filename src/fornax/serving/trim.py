"""Memory that a burst of requests left with the C library's allocator goes back to the system.

glibc keeps freed memory for the next request, hundreds of megabytes after a burst of large ones. It
is asked to let go only while nothing runs, since what allocates meanwhile waits.
"""

import asyncio
import ctypes
import os
from collections.abc import Callable
from pathlib import Path

__all__ = ["give_back_memory", "resident_bytes"]

_STATM = Path("/proc/self/statm")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_WORTH = 32 * 2**20
"""Bytes of growth since the last time for which it is asked again."""


def resident_bytes() -> int:
    """What the process holds of the machine's memory; 0 where the system does not say."""
    if not _STATM.exists():
        return 0
    return int(_STATM.read_text().split()[1]) * _PAGE


def _trimmer() -> Callable[[], None] | None:
    """glibc's malloc_trim; None where there is none."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return None if trim is None else lambda: trim(0)


async def give_back_memory(busy: Callable[[], bool], *, seconds: float = 5.0) -> None:
    """Until cancelled: give back, every so many seconds, what is free, unless requests run."""
    trim = _trimmer()
    least = 0
    while trim is not None:
        await asyncio.sleep(seconds)
        if resident_bytes() > least + _WORTH and not busy():
            await asyncio.to_thread(trim)
            least = resident_bytes()
