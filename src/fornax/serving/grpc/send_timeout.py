"""Send timeout: a client that reads nothing of an answer for too long loses its connection.

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
from collections.abc import Collection, Iterator
from pathlib import Path
from urllib.parse import unquote

from fornax.serving.grpc.methods import Context

__all__ = ["SendTimeout"]

_LOG = logging.getLogger("fornax.serving.grpc")
_DESCRIPTORS = Path("/proc/self/fd")
_PROGRESS = 4096
"""Bytes; pings and their answers are fewer."""
_PAUSE = 0.1
"""Seconds between checks, at least: each goes through all of the process's descriptors."""
_INFO_BYTES = 128
"""Of Linux's `tcp_info`, up to and with `tcpi_bytes_acked`."""


class SendTimeout:
    """The answers that the transport still holds, and when to check their connections."""

    def __init__(self, seconds: float):
        self._half = seconds / 2
        self._waiting: dict[Context, tuple[float, int | None]] = {}
        """Call -> (when to check, bytes its client had acknowledged before), in order of checks."""
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, context: Context) -> None:
        """Watch a call whose answer is about to be sent, until it is done."""
        self._schedule(context, None)
        context.add_done_callback(self._done)  # pyrefly: ignore[bad-argument-type]

    def _schedule(self, context: Context, taken: int | None) -> None:
        self._waiting[context] = time.monotonic() + self._half, taken
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._half, self._check)

    def _done(self, context: Context) -> None:
        self._waiting.pop(context, None)

    def _check(self) -> None:
        """Close the connections that made no progress since the last check."""
        self._timer = None
        now = time.monotonic()
        late = [(context, taken) for context, (due, taken) in self._waiting.items() if due <= now]
        for context, _ in late:
            del self._waiting[context]
        with _connections({context.peer() for context, _ in late}) as found:
            for context, before in late:
                peer = context.peer()
                if peer not in found:
                    continue
                taken = _taken(found[peer])
                if before is None or taken - before > _PROGRESS:
                    self._schedule(context, taken)
                else:
                    found.pop(peer).shutdown(socket.SHUT_RDWR)
                    _LOG.warning("closed the connection of %s: it took no answer", peer)
        if self._waiting and self._timer is None:
            wait = max(next(iter(self._waiting.values()))[0] - now, min(_PAUSE, self._half))
            self._timer = asyncio.get_running_loop().call_later(wait, self._check)

    def close(self) -> None:
        """Stop checking."""
        if self._timer is not None:
            self._timer.cancel()


@contextlib.contextmanager
def _connections(peers: Collection[str]) -> Iterator[dict[str, socket.socket]]:
    """This process's sockets to `peers`, as gRPC names them; without those that cannot be found.

    Only for `ipv4:` and `ipv6:`, and where the system lists a process's descriptors.
    """
    wanted: dict[tuple[str, int] | None, str] = {
        _address(peer): peer for peer in peers if peer.startswith(("ipv4:", "ipv6:"))
    }
    found: dict[str, socket.socket] = {}
    with contextlib.ExitStack() as stack:
        for name in os.listdir(_DESCRIPTORS) if wanted and _DESCRIPTORS.is_dir() else ():
            candidate = _duplicate(int(name))
            peer = None if candidate is None else wanted.get(_peer(candidate))
            if candidate is not None and peer is not None:
                found[peer] = stack.enter_context(candidate)
            elif candidate is not None:
                candidate.close()
        yield found


def _address(peer: str) -> tuple[str, int]:
    host, _, port = unquote(peer.partition(":")[2]).rpartition(":")
    return host.strip("[]"), int(port)


def _duplicate(descriptor: int) -> socket.socket | None:
    """A duplicate of a descriptor as a socket; None where it is not a socket, or closed by now."""
    try:
        copy = os.dup(descriptor)
    except OSError:
        return None
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        return None


def _peer(connection: socket.socket) -> tuple[str, int] | None:
    """The peer's address; None where it is not connected by TCP."""
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return None
    try:
        address = connection.getpeername()
    except OSError:
        return None
    return str(address[0]).removeprefix("::ffff:"), address[1]


def _taken(connection: socket.socket) -> int:
    """Bytes that the other end has acknowledged."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    return int.from_bytes(info[-8:], sys.byteorder)
