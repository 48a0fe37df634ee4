"""Answers on their way: a client that takes nothing of one for too long loses its connection.

The transport gives up a client whose system takes no bytes. One that answers pings, but allows no
data, it would wait for without end, and Python has no call of it to end that.
"""

import asyncio
import contextlib
import logging
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

__all__ = ["Sending"]

_LOG = logging.getLogger("fornax.serving.grpc")
_DESCRIPTORS = Path("/proc/self/fd")
_PROGRESS = 4096
"""Bytes; pings and their answers are fewer."""
_INFO_BYTES = 128
"""Of Linux's `tcp_info`, up to and with `tcpi_bytes_acked`."""


class Sending:
    """The answers that the transport still has, and when to look at their connections."""

    def __init__(self, seconds: float):
        self._half = seconds / 2
        self._waiting: dict[Any, tuple[float, int | None]] = {}
        """Call -> (when to look, bytes its client had taken before), in the order of looks."""
        self._sweep: asyncio.TimerHandle | None = None

    def began(self, context: Any) -> None:
        """A call's answer is made; what is left is its client's to take."""
        self._wait(context, None)
        context.add_done_callback(self._done)

    def _wait(self, context: Any, taken: int | None) -> None:
        self._waiting[context] = time.monotonic() + self._half, taken
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(self._half, self._look)

    def _done(self, context: Any) -> None:
        self._waiting.pop(context, None)

    def _look(self) -> None:
        """Close the connections that made no way since the last look."""
        self._sweep = None
        now = time.monotonic()
        for context, (due, before) in list(self._waiting.items()):
            if due > now:
                break
            del self._waiting[context]
            peer = context.peer()
            with _connection(peer) as found:
                if found is None:
                    continue
                taken = _taken(found)
                if before is None or taken - before > _PROGRESS:
                    self._wait(context, taken)
                else:
                    found.shutdown(socket.SHUT_RDWR)
                    _LOG.warning("closed the connection of %s: it took no answer", peer)
        if self._waiting and self._sweep is None:
            wait = max(next(iter(self._waiting.values()))[0] - now, 0.01)
            self._sweep = asyncio.get_running_loop().call_later(wait, self._look)

    def close(self) -> None:
        """Look no more."""
        if self._sweep is not None:
            self._sweep.cancel()


@contextlib.contextmanager
def _connection(peer: str) -> Iterator[socket.socket | None]:
    """This process's socket to `peer`, as gRPC names it; None where it cannot be found.

    Only for `ipv4:` and `ipv6:`, and where the system lists a process's descriptors.
    """
    kind, _, rest = peer.partition(":")
    host, _, port = unquote(rest).rpartition(":")
    with contextlib.ExitStack() as stack:
        found = None
        if kind in ("ipv4", "ipv6") and _DESCRIPTORS.is_dir():
            wanted = host.strip("[]"), int(port)
            for name in os.listdir(_DESCRIPTORS):
                with contextlib.suppress(OSError):
                    candidate = stack.enter_context(socket.socket(fileno=os.dup(int(name))))
                    if _is_to(candidate, wanted):
                        found = candidate
                        break
                    candidate.close()
        yield found


def _is_to(connection: socket.socket, peer: tuple[str, int]) -> bool:
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    address = connection.getpeername()
    return (str(address[0]).removeprefix("::ffff:"), address[1]) == peer


def _taken(connection: socket.socket) -> int:
    """Bytes that the other end has acknowledged."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    return int.from_bytes(info[-8:], sys.byteorder)
