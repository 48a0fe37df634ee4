"""What a server's process needs: signals in the event loop, open files, the loop itself."""

import asyncio
import contextlib
import resource
import signal
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

__all__ = ["raise_file_limit", "run_loop", "signals"]

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


def raise_file_limit() -> None:
    """Allow as many open files as the system does: each connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def run_loop(serving: Coroutine[Any, Any, int]) -> int:
    """Run a coroutine in the fastest loop there is."""
    try:
        import uvloop
    except ImportError:  # as on Windows
        return asyncio.run(serving)
    return uvloop.run(serving)
