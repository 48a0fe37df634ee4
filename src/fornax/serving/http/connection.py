"""A connection that is bounded where uvicorn's is not: what comes before a body and how slowly,
and how slowly a client takes what it asked for."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from fornax.serving.access import Limits
from fornax.serving.http.replies import Headers, always, error_reply
from fornax.serving.v2.datatypes import Raw

__all__ = ["connection"]

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


Call = Callable[[Any, Any, bytes], bool]
"""Answers uvicorn's cycle on a connection, for a body, without a task; or does nothing and says
False."""
Quick = Callable[[Any], Call | None]
"""What answers requests with the head that a scope has; None: they must go uvicorn's way."""

_KEPT_HEAD = 8192
"""Bytes of a head that is kept to be known again."""


class _Bounded(HttpToolsProtocol):
    """Uvicorn's protocol, with limits, and with a short way for requests that are like the last.

    A client sends the same head before each body of a size. Where the last request came whole in
    one piece, and was answered the quick way, the same head at the start of the next piece says the
    same: nothing of it is parsed again.
    """

    limits: Limits
    quick: Quick | None

    _call: Call | None = None
    """What answered the last request, if the next may be answered so without a look at its head."""
    _head = b""
    """Its head."""
    _whole = 0
    """Bytes of its head and body."""
    _idle_since: float | None = None
    _idle_timer: asyncio.TimerHandle | None = None

    _deferred: tuple[Any, Any] | None = None
    """A cycle that awaits its body before it gets a task, and the app for it."""

    pending: "asyncio.Future[Any] | None" = None
    """What the request in progress waits for; cancelled when the client leaves."""
    in_message = False
    """Whether something of the request is still to come."""
    _in_head = False
    _size = 0
    _timer: asyncio.TimerHandle | None = None
    _timed_head = False
    _sending: asyncio.TimerHandle | None = None
    _unsent = 0
    _defaults: list[tuple[bytes, bytes]] | None = None
    _default_lines = b""

    def connection_made(self, transport: Any) -> None:  # pyrefly: ignore[bad-override]
        """Begin; the first request's head is awaited."""
        super().connection_made(transport)
        if len(self.connections) > self.limits.max_connections:
            self.app = _CROWDED
        self._wait(self.limits.header_timeout, head=True)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client left, or was sent away."""
        self._stop_waiting()
        self._stop_watching()
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        self._call = self._idle_timer = None
        super().connection_lost(exc)
        if self.pending is not None:
            pending, self.pending = self.pending, None
            pending.cancel()

    def data_received(self, data: bytes) -> None:
        """Parse; then see whether a message still has something to come, and in what time."""
        call = self._call
        if call is not None:
            if len(data) == self._whole and data.startswith(self._head) and self._repeats():
                self._repeat(call, data)
                return
            self._call = None
        if self._in_head or not self.in_message:
            self._size += len(data)
        alone = self._between()
        super().data_received(data)
        if self._deferred is not None:
            self._begin(*self._deferred, data if alone else b"")
        if not self.in_message:
            self._size = 0
            if self._timer is not None:
                self._stop_waiting()
        elif self._in_head:
            if self._size > self.limits.max_header_bytes and not self.transport.is_closing():
                self.transport.write(_RAW_LONG_HEAD)
                self.transport.close()
            elif self._timer is None:
                self._wait(self.limits.header_timeout, head=True)
        elif self._timer is None or self._timed_head:
            self._size = 0
            self._wait(self.limits.body_timeout + _SLACK, head=False)

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        super().on_message_begin()
        self.in_message = self._in_head = True
        self.scope["fornax.connection"] = self  # pyrefly: ignore[bad-typed-dict-key]

    def on_headers_complete(self) -> None:
        """The head is there."""
        self._in_head = False
        most = self.limits.max_header_bytes
        if self._size > most:
            size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
            if size > most:
                self.app = _LONG_HEAD
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The body is there."""
        self.in_message = False
        super().on_message_complete()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        """Start a request; one that may be answered without a task waits for its body first."""
        deferrable = self.quick is not None and app is self.config.loaded_app
        if deferrable and cycle is self.cycle and self.in_message and not self.expect_100_continue:
            self._deferred = (cycle, app)
        else:
            super()._start_asgi_task(cycle, app)

    def _begin(self, cycle: Any, app: Any, data: bytes) -> None:
        """Answer a request; `data` is it and nothing else, or empty."""
        self._deferred = None
        if self.transport.is_closing():
            return
        call = None
        if self.quick is not None and not cycle.more_body:
            call = self.quick(cycle.scope)
        if call is None or not call(cycle, self, bytes(cycle.body)):
            super()._start_asgi_task(cycle, app)
        elif data and cycle is self.cycle and cycle.keep_alive and not self.expect_100_continue:
            size = len(data) - len(cycle.body)  # a body in chunks is shorter than its bytes
            if size <= _KEPT_HEAD and data.find(b"\r\n\r\n") + 4 == size:
                self._call, self._head, self._whole = call, data[:size], len(data)

    def _between(self) -> bool:
        """Whether the next byte begins a request, and no other is being answered."""
        cycle = self.cycle
        return not self.in_message and (cycle is None or cycle.response_complete)

    def _repeats(self) -> bool:
        """Whether a request may begin here, and be answered without a task."""
        return self._between() and not self.transport.is_closing() and not self.flow.write_paused

    def _repeat(self, call: Call, data: bytes) -> None:
        """Answer a request whose head is that of the last one."""
        cycle: Any = self.cycle
        self._idle_since = None
        cycle.body, cycle.more_body = data[len(self._head) :], False
        cycle.response_started = cycle.response_complete = False
        cycle.chunked_encoding, cycle.expected_content_length = None, 0
        if not call(cycle, self, cycle.body):
            self._call = None  # its scope and its cycle are the application's now
            app: Any = self.config.loaded_app
            super()._start_asgi_task(cycle, app)

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run what remains of an answer as a task of the server's."""
        task = self.loop.create_task(work)
        task.add_done_callback(self.tasks.discard)
        self.tasks.add(task)

    def answer(self, cycle: Any, status: int, headers: Headers, body: list[Raw]) -> bool:
        """Send a whole answer in one write: uvicorn makes two, each a system call, the first of
        which wakes the client for nothing. False: it must go uvicorn's way."""
        if self.flow.write_paused or cycle.response_started or cycle.disconnected:
            return False
        lines = [STATUS_LINE[status], self._usual_lines()]
        for name, value in headers:
            lines += (name, b": ", value, b"\r\n")
        lines.append(b"\r\n" if cycle.keep_alive else b"connection: close\r\n\r\n")
        cycle.response_started = cycle.response_complete = True
        cycle.waiting_for_100_continue = False
        self.transport.write(b"".join((*lines, *body)))
        cycle.message_event.set()
        if not cycle.keep_alive:
            self.transport.close()
        cycle.on_response()
        return True

    def _usual_lines(self) -> bytes:
        """The headers of every answer; uvicorn makes a new list of them every second."""
        headers = self.server_state.default_headers
        if headers is not self._defaults:
            self._defaults = headers
            self._default_lines = b"".join(b"%b: %b\r\n" % each for each in headers)
        return self._default_lines

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
        """The connection is idle no more."""
        self._idle_since = None

    def on_response_complete(self) -> None:
        """The connection is idle, or goes on with what came meanwhile.

        Uvicorn starts a timer here and stops it at the next request; one that looks at the time
        when it is over will do for all of them.
        """
        if self.pipeline or self.transport.is_closing():
            super().on_response_complete()
            return
        self.server_state.total_requests += 1
        if self.flow.read_paused:
            self.flow.resume_reading()
        self._idle_since = self.loop.time()
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

    def _wait(self, seconds: float, *, head: bool) -> None:
        self._stop_waiting()
        self._timed_head = head
        self._timer = self.loop.call_later(seconds, self._late)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        self._timer = None
        self.transport.abort()


def connection(limits: Limits, quick: Quick | None = None) -> type[asyncio.Protocol]:
    """The protocol of a server's connections."""
    bound = None if quick is None else staticmethod(quick)
    return type("Connection", (_Bounded,), {"limits": limits, "quick": bound})
