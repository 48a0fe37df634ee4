"""A connection that is bounded where uvicorn's is not: what comes before a body and how slowly,
and how slowly a client takes what it asked for."""

import asyncio
from collections.abc import Collection
from typing import Any

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from fornax.serving.access import Limits
from fornax.serving.http.replies import always, error_reply

__all__ = ["Bounded"]

_SLACK = 5.0
"""Seconds beyond a body's time in which the app may answer that it is late."""
_LEAST = 64 * 1024
"""Bytes that a client must take in `send_timeout`."""
_CROWDED = always(503, "this server has as many connections as it takes; try again later")
_LONG_HEAD = always(431, "the head of the request is larger than this server reads")


def _raw(status: bytes, message: str) -> bytes:
    body = error_reply(int(status[:3]), message)[2]
    return (
        b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
        b"connection: close\r\n\r\n%b" % (status, len(body), body)
    )


_RAW_LONG_HEAD = _raw(
    b"431 Request Header Fields Too Large",
    "the head of the request is larger than this server reads",
)
_RAW_INVALID = _raw(b"400 Bad Request", "this is no valid HTTP request")


class _Flow(FlowControl):
    """Uvicorn's, which reads on at each answer: a client that sends faster than it is answered
    would have all that it ever sent in memory."""

    def __init__(self, transport: Any, pipeline: Collection[Any]):
        super().__init__(transport)
        self._pipeline = pipeline

    def resume_reading(self) -> None:
        """Read on, unless whole requests wait for the answer of the one before."""
        if not self._pipeline:
            super().resume_reading()


class Bounded(HttpToolsProtocol):
    """Uvicorn's protocol, with limits."""

    limits: Limits

    _idle_since: float | None = None
    _idle_timer: asyncio.TimerHandle | None = None

    pending: "asyncio.Future[Any] | None" = None
    """What the request in progress waits for; cancelled when the client leaves."""
    in_message = False
    """Whether something of the request is still to come."""
    _in_head = False
    _size = 0
    """Bytes of the head in progress, at most."""
    _begun = False
    """Whether what came last began with, or has begun, a request."""
    _within = False
    """Whether the head in progress began behind another request, so that its size is not known."""
    _timer: asyncio.TimerHandle | None = None
    _sending: asyncio.TimerHandle | None = None
    _unsent = 0

    def connection_made(self, transport: Any) -> None:  # pyrefly: ignore[bad-override]
        """Begin; the first request's head is awaited."""
        super().connection_made(transport)
        self.flow = _Flow(transport, self.pipeline)
        if len(self.connections) > self.limits.max_connections:
            self.app = _CROWDED
        self._wait(self.limits.header_timeout)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client left, or was sent away."""
        self._stop_waiting()
        self._stop_watching()
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        self._idle_timer = None
        super().connection_lost(exc)
        if self.pending is not None:
            pending, self.pending = self.pending, None
            pending.cancel()

    def data_received(self, data: bytes) -> None:
        """Parse; then see whether a message still has something to come, and in what time."""
        if self._in_head or not self.in_message:
            self._size += len(data)
        self._begun = self.in_message
        super().data_received(data)
        self.begin()
        if not self.in_message:
            self._size = 0
        elif self._in_head:
            if self._size > self.limits.max_header_bytes and not self.transport.is_closing():
                self.transport.write(_RAW_LONG_HEAD)
                self.transport.close()
            elif self._timer is None:
                self._wait(self.limits.header_timeout)
        elif self._timer is None:
            self._size = 0
            self._wait(self.limits.body_timeout + _SLACK)

    def begin(self) -> None:
        """Answer what has come whole, if it is not being answered."""

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        super().on_message_begin()
        self.in_message = self._in_head = True
        self._within, self._begun = self._begun, True
        if self._within:
            self._size = 0
        self._idle_since = None
        self.scope["fornax.connection"] = self  # pyrefly: ignore[bad-typed-dict-key]

    def on_headers_complete(self) -> None:
        """The head is there."""
        self._in_head = False
        self._stop_waiting()
        most = self.limits.max_header_bytes
        if self._size > most or self._within:
            size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
            if size > most:
                self.app = _LONG_HEAD
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The body is there."""
        self.in_message = False
        self._stop_waiting()
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP gets an error of the protocol's form."""
        self.transport.write(_RAW_INVALID)
        self.transport.close()

    def pause_writing(self) -> None:
        """The client takes its answer more slowly than it is made: watch it."""
        super().pause_writing()
        if self._sending is None:
            self._watch()

    def resume_writing(self) -> None:
        """The client has nearly all."""
        super().resume_writing()
        self._stop_watching()

    def _unset_keepalive_if_required(self) -> None:
        """Nothing: uvicorn takes blank lines for a request."""

    def on_response_complete(self) -> None:
        """The connection is idle, or goes on with what came meanwhile.

        Uvicorn starts a timer here and stops it at the next request; one that looks at the time
        when it is over will do for all of them.
        """
        if self.pipeline or self.transport.is_closing():
            super().on_response_complete()
            self.flow.resume_reading()
            return
        self.server_state.total_requests += 1
        if self.flow.read_paused:
            self.flow.resume_reading()
        self._idle_since = None if self.in_message else self.loop.time()
        if self._idle_timer is None:
            self._idle(self.timeout_keep_alive)

    def _idle(self, seconds: float) -> None:
        self._idle_timer = self.loop.call_later(seconds, self.timeout_keep_alive_handler)

    def timeout_keep_alive_handler(self) -> None:
        """Idle for long: end it, unless the client is still taking a large answer."""
        self._idle_timer = None
        since = self._idle_since
        left = 0.0 if since is None else since + self.timeout_keep_alive - self.loop.time()
        if since is None or self._sending is not None:
            self._idle(self.timeout_keep_alive)
        elif left > 0.01:
            self._idle(left)
        elif self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            self.transport.close()

    def _watch(self) -> None:
        self._unsent = self.transport.get_write_buffer_size()
        self._sending = self.loop.call_later(self.limits.send_timeout, self._check_progress)

    def _check_progress(self) -> None:
        self._sending = None
        if self._unsent - self.transport.get_write_buffer_size() < _LEAST:
            self.transport.abort()
        else:
            self._watch()

    def _stop_watching(self) -> None:
        if self._sending is not None:
            self._sending.cancel()
            self._sending = None

    def _wait(self, seconds: float) -> None:
        self._stop_waiting()
        self._timer = self.loop.call_later(seconds, self._late)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        self._timer = None
        if self.flow.read_paused:  # it is not the client that is late
            self._wait(self.limits.header_timeout)
        else:
            self.transport.abort()
