"""Staying awake after a lone request: the next one is met without a sleep and a wake-up.

A processor that halts between two requests comes back with cold caches, and later than a small
request takes: on a virtual machine that is 60 us of 190. So the loop looks again for a moment
instead of sleeping. It gives the interpreter's lock away at each look, and does not do so while
anything runs in a thread.
"""

import asyncio
import time
from collections.abc import Callable

__all__ = ["Awake"]


class Awake:
    """Keeps an event loop looking at its sockets for `seconds` after each call of `stay`."""

    def __init__(self, seconds: float, busy: Callable[[], bool]):
        """`busy()`: whether threads would rather have the processor."""
        self._seconds = seconds
        self._busy = busy
        self._until = 0.0
        self._looking = False

    def stay(self, loop: asyncio.AbstractEventLoop) -> None:
        """A request was answered and no other waits; call in the loop's thread."""
        if self._seconds <= 0:
            return
        self._until = time.monotonic() + self._seconds
        if not self._looking:
            self._looking = True
            loop.call_soon(self._look, loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self._looking = time.monotonic() < self._until and not self._busy()
        if self._looking:
            loop.call_soon(self._look, loop)
