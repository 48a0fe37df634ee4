"""Memory of this machine."""

__all__ = ["available_memory"]


def available_memory() -> int | None:
    """Bytes that the kernel could hand out without swapping, caches included; None where it does
    not say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            return next(int(x.split()[1]) << 10 for x in lines if x.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        return None
