"""From a command line to a running server: the one place that builds the engine."""

import asyncio
import contextlib
import dataclasses
import logging
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from fornax.config import ConfigError
from fornax.llm.config import EngineConfig
from fornax.llm.server.app import create_app, create_server
from fornax.llm.server.config import ServerConfig
from fornax.llm.server.engine import Engine
from fornax.llm.server.lifecycle import bind, raise_file_limit, serve
from fornax.llm.server.metrics import Metrics
from fornax.llm.server.record import configure_logging
from fornax.llm.stats import Observer

__all__ = ["ServeConfig", "build_observed", "engine_metrics", "serve_model"]

C = TypeVar("C")
_SWITCH = 5e-4
"""Seconds that one thread may keep the interpreter from the others, where it lets go at all: the
engine's thread asks for it several times a token, behind requests being read."""

_log = logging.getLogger(__name__)
_LONGEST = 131_072
"""Upper end of the histograms of lengths where the config does not limit the length."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeConfig(ServerConfig, EngineConfig):
    """What `fornax serve` can be told: the engine's keys and the server's."""

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


Builder = Callable[[str, ServeConfig, Observer], Engine]


def serve_model(model: str, config: ServeConfig, build: Builder | None = None) -> int:
    """Serve a model until told to stop; the exit code. `build` makes the engine."""
    configure_logging()
    raise_file_limit()
    sys.setswitchinterval(_SWITCH)
    with contextlib.closing(bind(config.server())) as listener:
        metrics = engine_metrics(model, config)
        engine = (build or build_observed)(model, config, metrics)
        server = create_server(engine, config.server(), model=model, metrics=metrics)
        engine.start()
        try:
            return _run(serve(create_app(server), listener))
        finally:
            engine.shutdown()


def engine_metrics(model: str, config: ServeConfig) -> Metrics:
    """The metrics of an engine that is still to be built."""
    metrics = Metrics(
        (config.served_model_name or (model,))[0],
        max_model_len=config.max_model_len or _LONGEST,
        max_loras=config.max_loras if config.enable_lora else 0,
    )
    metrics.describe_cache(_cache(config))
    return metrics


def build_observed(model: str, config: ServeConfig, observer: Observer) -> Engine:
    """An engine for a Hugging Face directory, whose steps and requests `observer` is told of."""
    from fornax.llm.async_engine import AsyncEngine
    from fornax.llm.build import build_engine

    parts = build_engine(
        Path(model), config.engine(), tokenizer=config.tokenizer, observer=observer
    )
    return AsyncEngine(parts)


def _cache(config: EngineConfig) -> dict[str, object]:
    return {
        "block_size": config.block_size or "auto",
        "cache_dtype": config.kv_cache_dtype,
        "enable_prefix_caching": config.enable_prefix_caching,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "num_gpu_blocks_override": config.num_gpu_blocks_override,
    }


def _run(serving: Coroutine[Any, Any, int]) -> int:
    try:
        import uvloop
    except ImportError:  # as on Windows
        return asyncio.run(serving)
    return uvloop.run(serving)
