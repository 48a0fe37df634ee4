"""Memory of this machine."""

import ctypes

__all__ = ["available_memory", "trim_heap"]


def available_memory() -> int | None:
    """Bytes that the kernel could hand out without swapping, caches included; None where it does
    not say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            return next(int(x.split()[1]) << 10 for x in lines if x.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        return None


def trim_heap() -> bool:
    """Give the kernel what glibc keeps of freed memory for the next request; whether it is glibc.

    Compilers and bursts of large requests leave hundreds of megabytes. What allocates meanwhile
    waits.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None:
        return False
    trim(0)
    return True
