"""HTTP/1.1 client with little work per token: bytes are kept with their arrival time, parsed later.

A load generator on the server's machine takes processor time from it. So while requests run, this
only parses HTTP framing (in C, by httptools) and notes when each piece of a body came; the pieces
are read when the run is over.
"""

import asyncio
import json
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

import httptools

__all__ = ["ConnectionLostError", "Exchange", "Pool", "error_message", "request_bytes"]


class ConnectionLostError(ConnectionError):
    """The connection broke, or brought something that is not HTTP, before the answer was whole."""


@dataclass(slots=True)
class Exchange:
    """One request and what came back. Times are `time.perf_counter()` seconds."""

    started: float
    status: int = 0
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    """Each piece of the body with the time at which it came."""

    @property
    def body(self) -> bytes:
        """The whole body."""
        return b"".join(piece for _, piece in self.pieces)


def error_message(body: bytes) -> str:
    """The message of an error's body, OpenAI's or V2's, or the body's beginning."""
    try:
        error = json.loads(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return body[:500].decode(errors="replace")


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
        self._loop = asyncio.get_running_loop()
        self.lost = self._loop.create_future()
        self._exchange = Exchange(0.0)
        self._done: asyncio.Future[None] | None = None
        self._now = 0.0
        self._parser = httptools.HttpResponseParser(self)

    def send(self, request: bytes, started: float) -> tuple[Exchange, "asyncio.Future[None]"]:
        """Send a request; the future is done when its answer is whole."""
        assert self.transport is not None
        self._exchange = Exchange(started)
        self._done = self._loop.create_future()
        self.transport.write(request)
        return self._exchange, self._done

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is open."""
        self.transport = cast("asyncio.Transport", transport)  # uvloop's class is not a subclass

    def data_received(self, data: bytes) -> None:
        """Bytes arrived."""
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(ConnectionLostError(f"the answer is not HTTP: {error}"))
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is closed."""
        self.closed = True
        self.lost.set_result(None)
        why = f"the server closed the connection{f' ({exc})' if exc else ''}"
        self._fail(ConnectionLostError(why))

    def on_body(self, body: bytes) -> None:
        """The parser found a piece of the body."""
        self._exchange.pieces.append((self._now, body))

    def on_message_complete(self) -> None:
        """The parser found the end of the answer."""
        self._exchange.status = self._parser.get_status_code()
        if self._exchange.status < 200:
            return
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

    def expire(self) -> None:
        """Give up on the answer."""
        self._fail(TimeoutError())
        self.close()

    def _fail(self, error: Exception) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)


class Pool:
    """Connections to one server, used again once their answer is whole.

    Args:
        timeout: seconds that an answer may take.
        tls: None for plain text.
        replace: send a request once more when the server closed its idle connection meanwhile.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        timeout: float,
        tls: ssl.SSLContext | None = None,
        replace: bool = True,
    ) -> None:
        self._host, self._port, self._tls = host, port, tls
        self._timeout, self._replace = timeout, replace
        self._idle: list[_Connection] = []
        self._open: set[_Connection] = set()

    async def connect(self, count: int) -> None:
        """Open `count` connections ahead. Raises OSError when the server takes none."""
        self._idle += await asyncio.gather(*(self._connect() for _ in range(count)))

    async def exchange(self, request: bytes) -> Exchange:
        """Send a request and wait for its whole answer.

        Raises OSError when there is no connection, ConnectionLostError when it breaks, TimeoutError
        when the answer takes too long.
        """
        started = time.perf_counter()
        loop = asyncio.get_running_loop()
        while True:
            while self._idle and self._idle[-1].closed:
                self._idle.pop()
            connection = self._idle.pop() if self._idle else await self._connect()
            fresh = not connection.used
            exchange, done = connection.send(request, started)
            timer = loop.call_later(self._timeout, connection.expire)
            try:
                await done
            except ConnectionLostError:
                if fresh or exchange.pieces or not self._replace:
                    raise
                continue
            except BaseException:
                connection.close()
                raise
            finally:
                timer.cancel()
            if not connection.closed:
                self._idle.append(connection)
            return exchange

    async def close(self) -> None:
        """Close every connection."""
        for connection in self._open:
            connection.close()
        await asyncio.gather(*(connection.lost for connection in self._open))
        self._open.clear()

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            _Connection, self._host, self._port, ssl=self._tls
        )
        self._open = {held for held in self._open if not held.lost.done()} | {connection}
        return connection
