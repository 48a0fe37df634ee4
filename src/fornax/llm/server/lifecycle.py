"""The server's life: listen, serve, drain on SIGTERM, stop when the engine dies."""

import asyncio
import contextlib
import gc
import logging
import os
import resource
import signal
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from fornax.llm.server.app import guarded
from fornax.llm.server.config import ServerConfig
from fornax.llm.server.connection import bounded
from fornax.llm.server.state import Server

__all__ = ["bind", "raise_file_limit", "serve"]

_log = logging.getLogger(__name__)
_BACKLOG = 2048
_GRACE = 1.0
"""Seconds in which /health says that the engine died, before the process ends."""
_POLL = 0.1


def bind(config: ServerConfig) -> socket.socket:
    """Take the address, without listening yet; OSError when it is not to be had."""
    if config.uds is not None:
        path = Path(config.uds)
        if path.exists() and stat.S_ISSOCK(path.stat().st_mode):
            path.unlink()  # left behind by a server that is gone
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(config.uds)
        return listener
    family, kind, _, _, address = socket.getaddrinfo(
        config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux; connections have it from the listener
        milliseconds = round(config.send_timeout * 1000)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise OSError(error.errno, error.strerror, f"{config.host}:{config.port}") from None
    return listener


def raise_file_limit() -> None:
    """Allow as many open files as the system does: each connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class _Uvicorn(uvicorn.Server):
    """Uvicorn that drains on the first signal, stops on the second, and then exits as usual."""

    def __init__(self, config: uvicorn.Config, server: Server):
        super().__init__(config)
        self._ours = server

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
            _log.info("stopping: %d requests may finish", self._ours.load.running)
        self._ours.stopping = True
        self.should_exit = True


async def serve(app: FastAPI, listener: socket.socket) -> int:
    """Serve until told to stop; the exit code: 0, or 1 when the engine died.

    Raises EngineError for an adapter named at the start that cannot be loaded.
    """
    server: Server = app.state.server
    config = server.config
    uvicorn_config = uvicorn.Config(
        guarded(app),
        log_config=None,
        access_log=False,
        lifespan="off",
        http=bounded(config),
        ws="none",
        server_header=False,
        backlog=_BACKLOG,
        root_path=config.root_path,
        limit_concurrency=config.max_connections,
        timeout_keep_alive=config.timeout_keep_alive,  # pyrefly: ignore[bad-argument-type]
        timeout_graceful_shutdown=round(config.shutdown_timeout),
        ssl_keyfile=config.ssl_keyfile,
        ssl_certfile=config.ssl_certfile,
    )
    http = _Uvicorn(uvicorn_config, server)
    watch = asyncio.create_task(_watch(server, http))
    adapters = asyncio.create_task(_load_adapters(server, http))
    _log.info("listening on %s", _address(config, listener))
    gc.collect()
    gc.freeze()  # what lives as long as the process need not be looked at again
    try:
        await http.serve(sockets=[listener])
    finally:
        watch.cancel()
        adapters.cancel()
        if config.uds is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(config.uds)
    if adapters.done() and not adapters.cancelled():
        adapters.result()
    return 1 if server.engine.error() is not None else 0


async def _load_adapters(server: Server, http: uvicorn.Server) -> None:
    """Load the adapters named at the start; stop the server when one cannot be loaded."""
    modules = [module.partition("=")[::2] for module in server.config.lora_modules]
    server.adapters_left = len(modules)
    try:
        for name, path in modules:
            await server.engine.add_lora(name, path)
            server.adapters_left -= 1
            _log.info("loaded the adapter %s from %s", name, path)
    except BaseException:
        server.stopping = True
        http.should_exit = True
        raise


async def _watch(server: Server, http: uvicorn.Server) -> None:
    """Stop the server when the engine dies."""
    while (error := server.engine.error()) is None:
        await asyncio.sleep(_POLL)
    _log.critical("the engine died: %s: %s", type(error).__name__, error)
    await asyncio.sleep(_GRACE)
    server.stopping = True
    http.should_exit = True


def _address(config: ServerConfig, listener: socket.socket) -> str:
    if config.uds is not None:
        return f"unix:{config.uds}"
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    return f"{'https' if config.ssl_certfile else 'http'}://{shown}:{port}"
