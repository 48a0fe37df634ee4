"""A connection that answers inferences itself where nothing needs a task or an application.

A client sends the same head before each body of a size. Where the last request came whole in one
piece, and was answered here, the same head at the start of the next piece says the same: nothing of
it is parsed again.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from fornax.serving.access import Limits
from fornax.serving.http.connection import Bounded
from fornax.serving.http.replies import lines_of
from fornax.serving.v2.datatypes import Raw

__all__ = ["Call", "Quick", "connection"]

Call = Callable[[Any, Any, bytes], bool]
"""Answers uvicorn's cycle on a connection, for a body, without a task; or does nothing and says
False."""
Quick = Callable[[Any], Call | None]
"""What answers requests with the head that a scope has; None: they must go uvicorn's way."""

_KEPT_HEAD = 8192
"""Bytes of a head that is kept to be known again."""


class _Direct(Bounded):
    quick: Quick | None

    _deferred: tuple[Any, Any] | None = None
    """A cycle that awaits its body before it gets a task, and the app for it."""
    _answering: Any = None
    """The cycle whose turn it is; others may have come behind it."""
    _piece = b""
    """What came last, if it began with a request."""
    _call: Call | None = None
    """What answered the last request, if the next may be answered so without a look at its head."""
    _head = b""
    """Its head."""
    _whole = 0
    """Bytes of its head and body."""
    _defaults: list[tuple[bytes, bytes]] | None = None
    _default_lines = b""

    def connection_lost(self, exc: Exception | None) -> None:
        """The client left, or was sent away."""
        self._call = None
        cycle = self._answering
        if cycle is not None and not cycle.response_complete:  # uvicorn knows the last one alone
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Answer what is like the last request; parse everything else."""
        call = self._call
        if call is not None:
            if len(data) == self._whole and data.startswith(self._head) and self._repeats():
                self._repeat(call, data)
                return
            self._call = None
        self._piece = data if self._between() else b""
        super().data_received(data)
        self._piece = b""

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        """Start a request; one that may be answered without a task waits for its body first."""
        self._answering = cycle
        deferrable = self.quick is not None and app is self.config.loaded_app
        deferrable = deferrable and cycle is self.cycle and not self.expect_100_continue
        # What is still to come may belong to the request after this one.
        if deferrable and self.in_message and cycle.more_body:
            self._deferred = (cycle, app)
        else:
            super()._start_asgi_task(cycle, app)

    def begin(self) -> None:
        """Answer what was deferred."""
        if self._deferred is None:
            return
        (cycle, app), self._deferred = self._deferred, None
        if self.transport.is_closing():
            return
        data = self._piece
        call = None
        if self.quick is not None and not cycle.more_body:
            call = self.quick(cycle.scope)
        body = bytes(cycle.body)
        if call is None or not call(cycle, self, body):
            super()._start_asgi_task(cycle, app)
            return
        cycle.body = bytearray()  # or an idle connection would keep it
        if data and cycle is self.cycle and cycle.keep_alive and not self.expect_100_continue:
            size = len(data) - len(body)  # a body in chunks is shorter than its bytes
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
        cycle.response_started = cycle.response_complete = False
        cycle.chunked_encoding, cycle.expected_content_length = None, 0
        body = data[len(self._head) :]
        if not call(cycle, self, body):
            cycle.body = bytearray(body)
            self._call = None  # its scope and its cycle are the application's now
            app: Any = self.config.loaded_app
            super()._start_asgi_task(cycle, app)

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run what remains of an answer as a task of the server's."""
        task = self.loop.create_task(work)
        task.add_done_callback(self.tasks.discard)
        self.tasks.add(task)

    def answer(self, cycle: Any, status: int, lines: bytes, body: list[Raw]) -> bool:
        """Send a whole answer in one write: uvicorn makes two, each a system call, the first of
        which wakes the client for nothing. False: it must go uvicorn's way.

        `lines` are the headers beside those of every answer; see `lines_of`.
        """
        if self.flow.write_paused or cycle.response_started or cycle.disconnected:
            return False
        end = b"\r\n" if cycle.keep_alive else b"connection: close\r\n\r\n"
        cycle.response_started = cycle.response_complete = True
        cycle.waiting_for_100_continue = False
        self.transport.write(
            b"".join((STATUS_LINE[status], self._usual_lines(), lines, end, *body))
        )
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
            self._default_lines = lines_of(headers)
        return self._default_lines


def connection(limits: Limits, quick: Quick | None = None) -> type[asyncio.Protocol]:
    """The protocol of a server's connections."""
    bound = None if quick is None else staticmethod(quick)
    return type("Connection", (_Direct,), {"limits": limits, "quick": bound})
