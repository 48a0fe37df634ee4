"""From a command line to a running server: build the engine, listen, drain on SIGTERM."""

import asyncio
import contextlib
import dataclasses
import gc
import logging
import os
import signal
import socket
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import uvicorn
import uvloop
from fastapi import FastAPI
from pydantic_core import to_json
from starlette.types import ASGIApp

from fornax.config import ConfigError, environment
from fornax.config.credentials import Credentials, of_run
from fornax.config.http_server import listen, raise_file_limit, server_config, shown_address
from fornax.llm.config import EngineConfig
from fornax.llm.server.app import asgi_app, create_app, create_server
from fornax.llm.server.config import ServerConfig
from fornax.llm.server.errors import ApiError
from fornax.llm.server.metrics import Metrics
from fornax.llm.server.middleware import configure_logging
from fornax.llm.server.state import Server
from fornax.llm.stats import Observer

if TYPE_CHECKING:
    from fornax.llm.async_engine import AsyncEngine

__all__ = [
    "ServeConfig",
    "bind",
    "build_observed",
    "engine_metrics",
    "serve",
    "serve_model",
    "uvicorn_config",
]

_log = logging.getLogger(__name__)
_GRACE = 1.0
"""Seconds in which /health says that the engine died, before the process ends."""
_POLL = 0.1
_SWITCH = 5e-4
"""Seconds that one thread may keep the interpreter from the others, where it lets go at all: the
engine's thread asks for it several times a token, behind requests being read."""

_LONGEST = 131_072
"""Upper end of the histograms of lengths where the config does not limit the length."""

C = TypeVar("C")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeConfig(ServerConfig, EngineConfig):
    """Options of `fornax serve`: the engine's and the server's."""

    tokenizer: str | None = None
    """The tokenizer.json or its folder (default: the model's)."""

    def __post_init__(self) -> None:
        EngineConfig.__post_init__(self)
        ServerConfig.__post_init__(self)
        if self.lora_modules and not self.enable_lora:
            raise ConfigError("lora_modules needs enable_lora; add --enable-lora")

    def engine(self) -> EngineConfig:
        """The engine's part."""
        return _part(EngineConfig, self)

    def server(self) -> ServerConfig:
        """The server's part."""
        return _part(ServerConfig, self)


def _part(cls: type[C], whole: object) -> C:
    names = [field.name for field in dataclasses.fields(cls)]  # pyrefly: ignore[bad-argument-type]
    return cls(**{name: getattr(whole, name) for name in names})


Builder = Callable[[str, ServeConfig, Observer], "AsyncEngine"]


def serve_model(model: str, config: ServeConfig, build: Builder | None = None) -> int:
    """Serve a model until a signal stops it; the exit code. `build` makes the engine.

    Where FORNAX_ variables say that it is one of several processes, all of them call this with
    the same model and config: process 0 serves, the others have parts of its engine.

    Raises:
      ClusterError: the processes do not all join, differ, or cannot be one engine.
    """
    configure_logging()
    raise_file_limit()
    sys.setswitchinterval(_SWITCH)
    build = build or build_observed
    several = bool(environment.coordinator())
    if several and _process_number(config) > 0:
        return _follow(model, config, build)
    with contextlib.closing(bind(config.server())) as listener:
        metrics = engine_metrics(model, config)
        engine = build(model, config, metrics)
        if several:
            engine.join(config.engine())
        server = create_server(engine, config.server(), model=model, metrics=metrics)
        engine.start()
        try:
            return uvloop.run(serve(create_app(server), listener))
        finally:
            engine.shutdown()


def _process_number(config: ServeConfig) -> int:
    """Join the processes of the engine; this one's number."""
    import jax

    from fornax.llm.group import check_group
    from fornax.mesh.startup import initialize

    initialize()
    check_group(config.engine())
    return jax.process_index()


def _follow(model: str, config: ServeConfig, build: Builder) -> int:
    """Have a part of process 0's engine until it ends; it also decides about signals."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    engine = build(model, config, engine_metrics(model, config))
    engine.join(config.engine())
    _log.info("has a part of the engine of process 0")
    engine.follow()
    return 0


def engine_metrics(model: str, config: ServeConfig) -> Metrics:
    """The metrics of an engine that is still to be built."""
    return Metrics(
        (config.served_model_name or (model,))[0],
        max_model_len=config.max_model_len or _LONGEST,
        max_loras=config.max_loras if config.enable_lora else 0,
        cache_config={
            "block_size": config.block_size or "auto",
            "cache_dtype": config.kv_cache_dtype,
            "enable_prefix_caching": config.enable_prefix_caching,
            "gpu_memory_utilization": config.gpu_memory_utilization,
            "num_gpu_blocks_override": config.num_gpu_blocks_override,
        },
    )


def build_observed(model: str, config: ServeConfig, observer: Observer) -> "AsyncEngine":
    """An engine for a Hugging Face directory, whose steps and requests go to `observer`."""
    from fornax.llm.async_engine import AsyncEngine
    from fornax.llm.build import build_engine

    parts = build_engine(
        Path(model), config.engine(), tokenizer=config.tokenizer, observer=observer
    )
    return AsyncEngine(parts)


def bind(config: ServerConfig) -> socket.socket:
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
    app: ASGIApp, config: ServerConfig, credentials: Credentials | None = None
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
            _log.info("stopping: %d requests may finish", self._ours.concurrency.running)
        self._ours.stopping = True
        self.should_exit = True


async def serve(app: FastAPI, listener: socket.socket) -> int:
    """Serve until a signal stops it; the exit code: 0, or 1 when the engine died.

    Raises EngineError for an adapter named at the start that cannot be loaded.
    """
    server: Server = app.state.server
    config = server.config
    bounded = uvicorn_config(asgi_app(app), config, of_run())
    bounded.timeout_graceful_shutdown = round(config.shutdown_timeout)
    http = _Uvicorn(bounded, server)
    watch = asyncio.create_task(_watch(server, http))
    adapters = asyncio.create_task(_load_adapters(server, http))
    _log.info("listening on %s", _address(config, listener, secure=bounded.is_ssl))
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


def _address(config: ServerConfig, listener: socket.socket, *, secure: bool) -> str:
    if config.uds is not None:
        return f"unix:{config.uds}"
    host, port = listener.getsockname()[:2]
    return f"{'https' if secure else 'http'}://{shown_address(host, port)}"
