"""The memory that work takes at its height, measured in the process that does it."""

import threading
import time
from collections.abc import Callable
from typing import TypeVar

__all__ = ["peak_of"]

Result = TypeVar("Result")


def peak_of(work: Callable[[], Result]) -> tuple[Result, int]:
    """What `work` returns, and the most bytes that the process held meanwhile beyond those before.

    Mapped files belong to the page cache and are not counted. Linux alone says this.
    """
    before = peak = _anonymous()
    done = False

    def watch() -> None:
        nonlocal peak
        while not done:
            peak = max(peak, _anonymous())
            time.sleep(0.0005)

    watcher = threading.Thread(target=watch)
    watcher.start()
    result = work()
    done = True
    watcher.join()
    return result, peak - before


def _anonymous() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))
