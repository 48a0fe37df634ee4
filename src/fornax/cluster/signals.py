"""Ctrl-C, SIGTERM and a closed terminal, while something is launched."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

__all__ = ["signals_to"]


@contextlib.contextmanager
def signals_to(asked: list[int]) -> Iterator[None]:
    """Within the block SIGINT, SIGTERM and SIGHUP only append to `asked`, SIGHUP as SIGTERM.

    Outside the main thread, where Python installs no handlers, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ask(number: int, frame: FrameType | None) -> None:
        asked.append(signal.SIGTERM if number == signal.SIGHUP else number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, ask) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
