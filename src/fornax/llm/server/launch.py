"""From a command line to a running server: build the engine, listen, drain on SIGTERM."""

import contextlib
import dataclasses
import logging
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import uvloop
from fastapi import FastAPI

from fornax.config import ConfigError, environment
from fornax.config.http_server import raise_file_limit
from fornax.config.tracing import Spans
from fornax.llm.config import EngineConfig
from fornax.llm.server.app import asgi_app, create_app, create_server
from fornax.llm.server.config import ServerConfig
from fornax.llm.server.listening import bind, serve_app
from fornax.llm.server.metrics import Metrics
from fornax.llm.server.middleware import configure_logging
from fornax.llm.server.state import Server
from fornax.llm.server.tracing import RequestTracer
from fornax.llm.stats import Observer

if TYPE_CHECKING:
    from fornax.llm.async_engine import AsyncEngine

__all__ = [
    "ServeConfig",
    "build_observed",
    "engine_metrics",
    "serve",
    "serve_model",
]

_log = logging.getLogger(__name__)
_SWITCH = 5e-4
"""Seconds that one thread may keep the interpreter from the others, where it releases it at all:
the engine's thread asks for it several times a token, behind requests being read."""

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
    with contextlib.closing(bind(config.server())) as listener, contextlib.ExitStack() as stack:
        metrics = engine_metrics(model, config)
        stack.callback(metrics.close)
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
    untraced = dataclasses.replace(config, otlp_traces_endpoint=None)
    engine = build(model, config, engine_metrics(model, untraced))
    engine.join(config.engine())
    _log.info("has a part of the engine of process 0")
    engine.follow(config.profile_dir)
    return 0


def engine_metrics(model: str, config: ServeConfig) -> Metrics:
    """The metrics of an engine that is still to be built, and the spans of its requests.

    Raises:
      ConfigError: traces are asked for, and OpenTelemetry is not installed.
    """
    metrics = Metrics(
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
    if config.otlp_traces_endpoint is not None:
        endpoint, rate = config.otlp_traces_endpoint, config.trace_sample_rate
        metrics.tracer = RequestTracer(Spans("fornax.llm", endpoint=endpoint, sample_rate=rate))
    return metrics


def build_observed(model: str, config: ServeConfig, observer: Observer) -> "AsyncEngine":
    """An engine for a Hugging Face directory, whose steps and requests go to `observer`."""
    from fornax.llm.async_engine import AsyncEngine
    from fornax.llm.build import build_engine

    parts = build_engine(
        Path(model), config.engine(), tokenizer=config.tokenizer, observer=observer
    )
    return AsyncEngine(parts)


async def serve(app: FastAPI, listener: socket.socket) -> int:
    """Serve until a signal stops it; the exit code: 0, or 1 when the engine died.

    Raises EngineError for an adapter named at the start that cannot be loaded.
    """
    server: Server = app.state.server
    return await serve_app(
        asgi_app(app),
        listener,
        server.config,
        server,
        prepare=lambda: _load_adapters(server),
    )


async def _load_adapters(server: Server) -> None:
    """Load the adapters named at the start."""
    modules = [module.partition("=")[::2] for module in server.config.lora_modules]
    server.adapters_left = len(modules)
    for name, path in modules:
        await server.engine.add_lora(name, path)
        server.adapters_left -= 1
        _log.info("loaded the adapter %s from %s", name, path)
