"""A connection that bounds what comes before a request's body: its size and its time."""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from fornax.llm.server.config import ServerConfig

__all__ = ["bounded"]

_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"content-length: 0\r\nconnection: close\r\n\r\n"
)


class _Bounded(HttpToolsProtocol):
    """Uvicorn's protocol, which takes headers without end and waits for them for ever."""

    max_bytes: int
    seconds: float

    _reading = False
    _size = 0
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._reading:
            self._size += len(data)
            if self._size > self.max_bytes and not self.transport.is_closing():
                self.transport.write(_TOO_LARGE)
                self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._reading, self._size = True, 0
        self._wait()

    def on_headers_complete(self) -> None:
        self._reading = False
        self._stop_waiting()
        super().on_headers_complete()

    def _wait(self) -> None:
        self._stop_waiting()
        self._timer = self.loop.call_later(self.seconds, self._close)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _close(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()


def bounded(config: ServerConfig) -> type[asyncio.Protocol]:
    """The protocol of a server's connections."""
    bounds = {"max_bytes": config.max_header_bytes, "seconds": config.header_timeout}
    return type("Connection", (_Bounded,), bounds)
