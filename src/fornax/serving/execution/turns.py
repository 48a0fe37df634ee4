"""A lock that goes to whoever has waited longest.

`threading.Lock` goes to whoever asks first once it is free, and that is often the thread that has
just let go of it: a batch that was assembled in time would see others overtake it.
"""

import threading
from collections import deque

__all__ = ["Turns"]


class Turns:
    """A context manager that lets threads in one at a time, in the order they came."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._taken = False
        self._waiting: deque[threading.Lock] = deque()

    def __enter__(self) -> None:
        with self._mutex:
            if not self._taken:
                self._taken = True
                return
            turn = threading.Lock()
            turn.acquire()
            self._waiting.append(turn)
        turn.acquire()

    def __exit__(self, *_: object) -> None:
        with self._mutex:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._taken = False
