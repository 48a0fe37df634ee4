"""Serving the app: an address, connections with limits, TLS, an orderly end."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Iterator
from typing import Any

import uvicorn

from fornax.serving.access import Limits, Tls
from fornax.serving.config import Address
from fornax.serving.http.direct import connection

__all__ = ["HttpServer"]

_BACKLOG = 2048
_STEP = 0.005


class _Uvicorn(uvicorn.Server):
    """Uvicorn that leaves signals to whoever runs it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


class HttpServer:
    """An app at an address, in the running event loop."""

    def __init__(self, app: Any, address: Address, limits: Limits, tls: Tls | None = None):
        self._address = address
        self._listener: socket.socket | None = None
        self._task: asyncio.Task[None] | None = None
        self._limits = limits
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            http=connection(limits, getattr(app, "quick", None)),
            ws="none",
            server_header=False,
            proxy_headers=False,
            backlog=_BACKLOG,
            timeout_keep_alive=limits.keep_alive,  # pyrefly: ignore[bad-argument-type]
            ssl_certfile=None if tls is None else tls.cert,
            ssl_keyfile=None if tls is None else tls.key,
            ssl_ca_certs=None if tls is None or tls.client_ca is None else str(tls.client_ca),
            ssl_cert_reqs=ssl.CERT_NONE if tls is None or not tls.client_ca else ssl.CERT_REQUIRED,
        )
        self._config = config
        self._server = _Uvicorn(config)

    def bind(self) -> Address:
        """Take the address, without answering yet; OSError when it is not to be had."""
        if self._listener is None:
            self._listener = _listen(self._address, self._limits)
            host, port = self._listener.getsockname()[:2]
            self._address = Address(host, port)
        return self._address

    async def start(self) -> Address:
        """Answer from now on; where. OSError when the address is not to be had."""
        self.bind()
        assert self._listener is not None
        self._task = asyncio.ensure_future(self._server.serve(sockets=[self._listener]))
        while not self._server.started:
            if self._task.done():
                task, self._task = self._task, None
                await self.stop()
                task.result()
                raise OSError(f"HTTP did not start on {self._address}")
            await asyncio.sleep(_STEP)
        return self._address

    async def stop(self, drain_seconds: float = 0.0) -> None:
        """Take no more connections, let requests in progress finish for so long, and end."""
        if self._task is not None:
            self._config.timeout_graceful_shutdown = max(1, round(drain_seconds))
            self._server.should_exit = True
            await self._task
            self._task = None
            await self._drop()
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    async def _drop(self) -> None:
        """Tell the clients of requests that outlasted the drain, which had no tasks to cancel."""
        connections: list[Any] = list(self._server.server_state.connections)
        waiting = [each.pending for each in connections if each.pending is not None]
        for each in waiting:
            each.cancel()
        if waiting:
            await asyncio.sleep(_STEP)


def _listen(address: Address, limits: Limits) -> socket.socket:
    family, kind, _, _, where = socket.getaddrinfo(
        address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux; connections have it from the listener
            milliseconds = round(limits.send_timeout * 1000)
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
        listener.bind(where)
    except OSError as error:
        listener.close()
        raise OSError(error.errno, error.strerror, str(address)) from None
    return listener
