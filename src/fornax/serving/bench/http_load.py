"""Load over HTTP: connections that send the next request when the last is answered.

A load generator beside the server takes processor time from it, so a request costs two callbacks
here: no task, no future, no copy of the body.
"""

import asyncio
import itertools
import json
import ssl
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import cast

import httptools

from fornax.serving.bench.counts import Counts, Window

__all__ = ["http_load"]

_PAUSE = 0.05
"""Seconds before a lost connection is opened again."""
_PATIENCE = 1.0
"""Seconds for a connection to be there or not."""
_CHECK = 0.25
_OK = 200
_SHOWN = 300


class _Caller(asyncio.Protocol):
    """One connection with at most one request in flight."""

    def __init__(self, load: "_Load", first: int):
        self._load = load
        self._requests = itertools.cycle(load.requests[first:] + load.requests[:first])
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._error = bytearray()
        self._ended = False
        self.sent: float | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is open."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's class is no subclass

    def send(self) -> None:
        """Send the next request, until the window ends."""
        now = time.monotonic()
        if now >= self._load.counts.window.end or self._transport is None:
            self._end()
            return
        self.sent = now
        self._transport.write(next(self._requests))

    def data_received(self, data: bytes) -> None:
        """Bytes of an answer."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail("not HTTP", str(error))
            self._abort()

    def on_body(self, body: bytes) -> None:
        """Only of an error is the body kept."""
        if self._parser.get_status_code() != _OK and len(self._error) < _SHOWN:
            self._error += body

    def on_message_complete(self) -> None:
        """The answer is whole."""
        status = self._parser.get_status_code()
        if self.sent is not None:
            if status == _OK:
                self._load.counts.succeeded(self.sent)
            else:
                self._load.counts.failed(f"HTTP {status}", _message(bytes(self._error)))
                self._error.clear()
            self.sent = None
        if self._parser.should_keep_alive():
            # Not within the parser's callback, which still has the rest of this answer to read.
            self._load.loop.call_soon(self.send)
        else:
            self._abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone, asked for or not."""
        self._transport = None
        if self.sent is not None:
            self._fail("connection lost", str(exc or "the server closed it"))
        if not self._ended:
            self._load.reopen(self)

    def overdue(self, limit: float) -> None:
        """Give up on a request that takes longer than `limit` seconds."""
        if self.sent is not None and time.monotonic() - self.sent > limit:
            self._fail("timeout", f"no answer in {limit:g} s")
            self._abort()

    def close(self) -> None:
        """End it."""
        self._end()
        self._abort()

    def _fail(self, reason: str, message: str) -> None:
        self.sent = None
        self._load.counts.failed(reason, message)

    def _abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _end(self) -> None:
        if not self._ended:
            self._ended = True
            self._load.ended(self)


class _Load:
    """The connections of one process."""

    def __init__(self, requests: Sequence[bytes], counts: Counts, address: tuple[str, int]):
        self.requests, self.counts = list(requests), counts
        self.loop = asyncio.get_running_loop()
        self.callers: set[_Caller] = set()
        self.done = self.loop.create_future()
        self._over = False
        self._address = address
        self._tls: ssl.SSLContext | None = None
        self._openings: set[asyncio.Task[None]] = set()
        self._every: list[_Caller] = []

    async def open(self, number: int, tls: ssl.SSLContext | None) -> list[_Caller]:
        """Open `number` connections; OSError when the server takes none."""
        self._tls = tls
        opened = [self._open(first % len(self.requests)) for first in range(number)]
        self.callers = set(await asyncio.gather(*opened))
        return list(self.callers)

    async def _open(self, first: int) -> _Caller:
        _, caller = await self.loop.create_connection(
            lambda: _Caller(self, first), *self._address, ssl=self._tls
        )
        self._every.append(caller)
        return caller

    def reopen(self, caller: _Caller) -> None:
        """Put another connection in the place of a lost one."""
        task = self.loop.create_task(self._reopen(caller))
        self._openings.add(task)
        task.add_done_callback(self._openings.discard)

    async def _reopen(self, caller: _Caller) -> None:
        while caller in self.callers:
            await asyncio.sleep(_PAUSE)
            if time.monotonic() >= self.counts.window.end:
                caller.close()
                return
            try:
                fresh = await self._open(0)
            except OSError as error:
                self.counts.failed("no connection", str(error))
                continue
            self.callers.discard(caller)
            self.callers.add(fresh)
            if not self._over:
                fresh.send()
            return

    async def close(self) -> None:
        """Close every connection, those that are being opened as well.

        They are waited for: one that is cancelled when it is there already would stay open.
        """
        self._over = True
        if self._openings:
            await asyncio.wait(self._openings, timeout=_PATIENCE)
        for task in self._openings:
            task.cancel()
        for caller in self._every:
            caller.close()

    def ended(self, caller: _Caller) -> None:
        """A connection has sent its last request."""
        self.callers.discard(caller)
        if not self.callers and not self.done.done():
            self.done.set_result(None)


async def http_load(
    requests: Sequence[bytes],
    *,
    address: tuple[str, int],
    tls: ssl.SSLContext | None,
    concurrency: int,
    timeout: float,
    ready: Callable[[], Awaitable[Window]],
) -> Counts:
    """Send `requests` in turn over `concurrency` connections.

    Args:
      ready: awaited when the connections are open; returns the window.

    Raises OSError when the server takes no connection.
    """
    load = _Load(requests, Counts(Window(0.0, 0.0)), address)
    callers = await load.open(concurrency, tls)
    load.counts.window = await ready()
    for caller in callers:
        caller.send()
    latest = load.counts.window.end + timeout
    while not load.done.done() and time.monotonic() < latest:
        await asyncio.wait([load.done], timeout=_CHECK)
        for caller in list(load.callers):
            caller.overdue(timeout)
    await load.close()
    return load.counts


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"])
    except (ValueError, LookupError, TypeError):
        return body[:_SHOWN].decode("utf-8", "replace")
