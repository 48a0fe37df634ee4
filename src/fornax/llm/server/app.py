"""The app: routes, errors, what every request passes."""

from typing import TYPE_CHECKING

from fastapi import FastAPI
from starlette.types import ASGIApp

from fornax.config import ConfigError
from fornax.llm.server import (
    chat,
    completions,
    embeddings,
    models,
    operations,
    tokens,
)
from fornax.llm.server.chat_protocol import ChatBody
from fornax.llm.server.config import ServerConfig
from fornax.llm.server.limits import ConcurrencyLimit
from fornax.llm.server.metrics import Metrics
from fornax.llm.server.middleware import RequestMiddleware
from fornax.llm.server.preprocessing import ChatRenderer, PromptEncoder
from fornax.llm.server.protocol import Body
from fornax.llm.server.state import Server
from fornax.llm.server.web import new_app
from fornax.profile import OnDemand

if TYPE_CHECKING:
    from fornax.llm.async_engine import AsyncEngine

__all__ = ["REQUEST_BODIES", "asgi_app", "create_app", "create_server"]

REQUEST_BODIES: dict[str, type[Body]] = {
    "/v1/completions": completions.CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/v1/embeddings": embeddings.EmbeddingBody,
}
"""The bodies whose fields the reference pages list."""


def create_server(
    engine: "AsyncEngine", config: ServerConfig, *, model: str, metrics: Metrics
) -> Server:
    """What the routes share. `metrics` is what the engine was given as its observer.

    Raises ConfigError for a model without a tokenizer.
    """
    if engine.tokenizer is None:
        raise ConfigError(f"there is no tokenizer in {model}; name one with --tokenizer PATH")
    defaults = engine.default_sampling_params if config.generation_config == "auto" else {}
    return Server(
        engine=engine,
        config=config,
        model=model,
        metrics=metrics,
        encoder=PromptEncoder(engine.tokenizer, engine.max_model_len),
        renderer=ChatRenderer(engine.chat_template, engine.tokenizer, config),
        concurrency=ConcurrencyLimit(config.max_concurrent_requests),
        captures=(
            None if config.profile_dir is None else OnDemand(config.profile_dir, engine.leader)
        ),
        defaults={**defaults, **(config.override_generation_config or {})},
    )


def create_app(server: Server) -> FastAPI:
    """The routes; `asgi_app` puts the gate around them."""
    config = server.config
    app = new_app(config, "An LLM behind OpenAI's interface.")
    app.state.server = server
    for part in (completions, chat, embeddings, models, tokens, operations):
        app.include_router(part.router)
    if config.enable_adapter_endpoints:
        app.include_router(models.adapters)
    if config.enable_dev_endpoints:
        app.include_router(operations.development)
    if config.profile_dir is not None:
        app.include_router(operations.profiles)
    return app


def asgi_app(app: FastAPI) -> ASGIApp:
    """The app as it is served."""
    server: Server = app.state.server
    return RequestMiddleware(app, server.config, server.metrics.request)
