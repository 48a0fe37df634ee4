"""Work that a thread of its own does later, a few items at a time: log lines, spans."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

__all__ = ["BackgroundQueue"]

T = TypeVar("T")

_PAUSE = 0.2
"""Seconds between looks at what waits."""
_MOST = 100_000
"""Items that may wait; more are counted and left out."""
_AT_ONCE = 32


class BackgroundQueue(Generic[T]):
    """What a listener does later, in a thread: hands items to `work`, in order, a few at a time."""

    def __init__(self, work: Callable[[Sequence[T]], None], name: str):
        """`work` must not raise; it is called by one thread."""
        self._work = work
        self._waiting: deque[T] = deque()
        self._left_out = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def add(self, item: T) -> None:
        """Have something done soon; in the event loop's thread."""
        if len(self._waiting) < _MOST:
            self._waiting.append(item)
        else:
            self._left_out += 1

    def take_left_out(self) -> int:
        """How many items were too many since this was last asked."""
        count, self._left_out = self._left_out, 0
        return count

    def close(self) -> None:
        """Do what waits, and end the thread."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(_PAUSE):
            self._empty()
        self._empty()

    def _empty(self) -> None:
        while self._waiting:
            count = min(len(self._waiting), _AT_ONCE)
            self._work([self._waiting.popleft() for _ in range(count)])
            time.sleep(0)  # the event loop goes before
