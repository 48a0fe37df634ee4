"""HTTP/1.1 with as little work per token as Python allows: bytes are stamped and kept, read later.

A load generator on the server's machine takes processor time from it. So while requests run, this
only parses HTTP framing (in C, by httptools) and notes when each piece of a body came; the pieces
are read when the run is over.
"""

import asyncio
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

import httptools

__all__ = ["Exchange", "Pool", "request_bytes"]


@dataclass(slots=True)
class Exchange:
    """One request and what came back. Times are `time.perf_counter()` seconds."""

    started: float
    status: int = 0
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    """Each piece of the body with the time at which it came."""
    ended: float = 0.0

    @property
    def body(self) -> bytes:
        """The whole body."""
        return b"".join(piece for _, piece in self.pieces)


def request_bytes(method: str, url: str, *, headers: Mapping[str, str], body: bytes = b"") -> bytes:
    """Return a request as it goes over the wire.

    Args:
        url: absolute; its path and query are asked for, its host named.
    """
    parts = urlsplit(url)
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    fields = {"Host": parts.netloc.rpartition("@")[2], "Content-Length": str(len(body)), **headers}
    lines = [f"{method} {target} HTTP/1.1", *(f"{key}: {value}" for key, value in fields.items())]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


class _Connection(asyncio.Protocol):
    """One connection, with at most one exchange at a time."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.closed = False
        self.used = False
        self.lost = asyncio.get_running_loop().create_future()
        self._exchange = Exchange(0.0)
        self._done: asyncio.Future[None] | None = None
        self._now = 0.0
        self._parser = httptools.HttpResponseParser(self)

    def send(self, request: bytes, started: float) -> tuple[Exchange, "asyncio.Future[None]"]:
        """Send a request; the future is done when its answer is whole."""
        assert self.transport is not None
        self._exchange = Exchange(started)
        self._done = asyncio.get_running_loop().create_future()
        self._parser = httptools.HttpResponseParser(self)
        self.transport.write(request)
        return self._exchange, self._done

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is open."""
        self.transport = cast("asyncio.Transport", transport)  # uvloop's class is no subclass

    def data_received(self, data: bytes) -> None:
        """Bytes came."""
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(ConnectionError(f"the answer is not HTTP: {error}"))
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is closed."""
        self.closed = True
        self.lost.set_result(None)
        self._fail(ConnectionError(f"the server closed the connection{f' ({exc})' if exc else ''}"))

    def on_body(self, body: bytes) -> None:
        """The parser found a piece of the body."""
        self._exchange.pieces.append((self._now, body))

    def on_message_complete(self) -> None:
        """The parser found the end of the answer."""
        self._exchange.status = self._parser.get_status_code()
        if self._exchange.status < 200:
            return
        self._exchange.ended = self._now
        self.used = True
        if not self._parser.should_keep_alive():
            self.close()
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    def close(self) -> None:
        """Close the connection."""
        self.closed = True
        if self.transport is not None:
            self.transport.close()

    def _fail(self, error: Exception) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)


class Pool:
    """Connections to one server, used again once their answer is whole."""

    def __init__(self, url: str, *, verify: bool = True) -> None:
        parts = urlsplit(url)
        secure = parts.scheme == "https"
        self._host = parts.hostname or "127.0.0.1"
        self._port = parts.port or (443 if secure else 80)
        self._ssl = _context(verify) if secure else None
        self._idle: list[_Connection] = []
        self._open: set[_Connection] = set()

    async def exchange(self, request: bytes) -> Exchange:
        """Send a request and wait for its whole answer.

        Raises OSError when there is no connection or it breaks. An idle connection that the server
        closed meanwhile is replaced by a new one.
        """
        started = time.perf_counter()
        while True:
            connection = await self._connection()
            fresh = not connection.used
            exchange, done = connection.send(request, started)
            try:
                await done
            except ConnectionError:
                if fresh or exchange.pieces:
                    raise
                continue
            except BaseException:
                connection.close()
                raise
            if not connection.closed:
                self._idle.append(connection)
            return exchange

    async def close(self) -> None:
        """Close every connection."""
        for connection in self._open:
            connection.close()
        await asyncio.gather(*(connection.lost for connection in self._open))
        self._open.clear()

    async def _connection(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed:
                return connection
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            _Connection, self._host, self._port, ssl=self._ssl
        )
        self._open = {held for held in self._open if not held.lost.done()} | {connection}
        return connection


def _context(verify: bool) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
