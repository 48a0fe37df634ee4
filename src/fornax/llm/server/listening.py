"""Listens for an app and runs it until a signal: bounds, TLS, draining, the run's file."""

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import stat
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

import uvicorn
from pydantic_core import to_json
from starlette.types import ASGIApp

from fornax.config.credentials import Credentials, of_run
from fornax.config.http_server import listen, server_config, shown_address
from fornax.config.server_file import recording_server
from fornax.llm.server.config import HttpConfig
from fornax.llm.server.errors import ApiError
from fornax.llm.server.limits import ConcurrencyLimit

__all__ = ["Served", "bind", "serve_app", "uvicorn_config"]

_log = logging.getLogger(__name__)
_GRACE = 1.0
"""Seconds in which /health says that the engine died, before the process ends."""
_POLL = 0.1


class Served(Protocol):
    """What is served: the state that the routes of an app share."""

    stopping: bool
    """Whether the server drains."""

    @property
    def concurrency(self) -> ConcurrencyLimit:
        """How many requests are being answered."""

    @property
    def names(self) -> tuple[str, ...]:
        """The model's names, at least one."""

    def error(self) -> BaseException | None:
        """Why the engine died, if it did."""

    def row(self, seconds: float) -> Mapping[str, object]:
        """What `server.jsonl` has of the seconds since the last call."""


def bind(config: HttpConfig) -> socket.socket:
    """Take the address, without listening yet; OSError when it is not to be had."""
    if config.uds is not None:
        path = Path(config.uds)
        if path.exists() and stat.S_ISSOCK(path.stat().st_mode):
            path.unlink()  # left behind by a server that is gone
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(config.uds)
        return listener
    return listen(config.host, config.port, config.send_timeout)


def uvicorn_config(
    app: ASGIApp, config: HttpConfig, credentials: Credentials | None = None
) -> uvicorn.Config:
    """How `app` is served: bounded connections, TLS, errors of connections as OpenAI's.

    Args:
      credentials: see `server_config`.
    """
    return server_config(
        app,
        config,
        lambda status, message: to_json(ApiError(status, message).body()),
        keep_alive=config.timeout_keep_alive,
        root_path=config.root_path,
        proxy_headers=True,
        certificate=config.ssl_certfile,
        key=config.ssl_keyfile,
        credentials=credentials,
    )


class _Uvicorn(uvicorn.Server):
    """Uvicorn that drains on the first signal, stops on the second, and then exits as usual."""

    def __init__(self, config: uvicorn.Config, served: Served, address: str):
        super().__init__(config)
        self._ours, self._address = served, address

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Log the address once it accepts connections."""
        await super().startup(sockets=sockets)
        _log.info("listening on %s", self._address)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle SIGTERM and SIGINT in the loop; do not raise them again afterwards."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signal)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def _signal(self) -> None:
        if self._ours.stopping:
            self.force_exit = True
        else:
            _log.info("stopping: %d requests may finish", self._ours.concurrency.running)
        self._ours.stopping = True
        self.should_exit = True


async def serve_app(
    app: ASGIApp,
    listener: socket.socket,
    config: HttpConfig,
    served: Served,
    *,
    prepare: Callable[[], Awaitable[None]] | None = None,
) -> int:
    """Serve until a signal stops it; the exit code: 0, or 1 when the engine died.

    Args:
      app: as it is served.
      listener: of `bind`.
      config: how.
      served: what the app's routes share.
      prepare: runs beside the server from the start; what it raises stops the server and is
        raised.
    """
    bounded = uvicorn_config(app, config, of_run())
    bounded.timeout_graceful_shutdown = round(config.shutdown_timeout)
    http = _Uvicorn(bounded, served, _address(config, listener, secure=bounded.is_ssl))
    watch = asyncio.create_task(_watch(served, http))
    prepared = asyncio.create_task(_prepare(prepare, served, http))
    gc.collect()
    gc.freeze()  # what lives as long as the process need not be looked at again
    try:
        with recording_server(config.run_dir, "serve", served.names[0], served.row):
            await http.serve(sockets=[listener])
    finally:
        watch.cancel()
        prepared.cancel()
        if config.uds is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(config.uds)
    if prepared.done() and not prepared.cancelled():
        prepared.result()
    return 1 if served.error() is not None else 0


async def _prepare(
    prepare: Callable[[], Awaitable[None]] | None, served: Served, http: uvicorn.Server
) -> None:
    """Run `prepare`; stop the server when it fails."""
    if prepare is None:
        return
    try:
        await prepare()
    except BaseException:
        served.stopping = True
        http.should_exit = True
        raise


async def _watch(served: Served, http: uvicorn.Server) -> None:
    """Stop the server when the engine dies."""
    while (error := served.error()) is None:
        await asyncio.sleep(_POLL)
    _log.critical("the engine died: %s: %s", type(error).__name__, error)
    await asyncio.sleep(_GRACE)
    served.stopping = True
    http.should_exit = True


def _address(config: HttpConfig, listener: socket.socket, *, secure: bool) -> str:
    if config.uds is not None:
        return f"unix:{config.uds}"
    host, port = listener.getsockname()[:2]
    return f"{'https' if secure else 'http'}://{shown_address(host, port)}"
