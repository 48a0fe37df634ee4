"""The app: routes, and what every request passes."""

import numpy as np
from fastapi import FastAPI
from starlette.types import ASGIApp

from fornax.config.errors import ConfigError
from fornax.diffusion.pipelines import ImageRequest, parse_size
from fornax.diffusion.server import images
from fornax.diffusion.server.config import ImageServerConfig
from fornax.diffusion.server.engine import Engine
from fornax.diffusion.server.metrics import Metrics
from fornax.diffusion.server.protocol import EditBody, GenerationBody, ImageBody, VariationBody
from fornax.diffusion.server.state import Server
from fornax.llm.server import operations
from fornax.llm.server.limits import ConcurrencyLimit
from fornax.llm.server.middleware import RequestMiddleware
from fornax.llm.server.web import new_app

__all__ = ["REQUEST_BODIES", "asgi_app", "create_app", "create_server", "start"]

REQUEST_BODIES: dict[str, type[ImageBody]] = {
    "/v1/images/generations": GenerationBody,
    "/v1/images/edits": EditBody,
    "/v1/images/variations": VariationBody,
}
"""The bodies whose fields the reference pages list."""


def create_server(
    engine: Engine, config: ImageServerConfig, *, model: str, metrics: Metrics
) -> Server:
    """What the routes share. `metrics` is what the engine was given as its observer.

    Raises ConfigError for a size that the model cannot draw, or a model that the API cannot ask.
    """
    pipeline = engine.pipeline
    if pipeline.follows or pipeline.fills:
        what = "images to follow" if pipeline.follows else "a mask with every request"
        raise ConfigError(
            f"{model} takes {what}, which the images API does not always have; draw with fornax "
            "diffusion sample, or serve a model that draws from prompts"
        )
    if pipeline.frames is not None:
        raise ConfigError(
            f"{model} draws videos, which the images API does not return; draw with fornax "
            "diffusion sample, or serve a model that draws images"
        )
    height, width = pipeline.size
    sizes = {name: parse_size(name) for name in config.sizes or (f"{width}x{height}",)}
    for size in sizes.values():
        try:
            pipeline.check_size(size)
        except ConfigError as error:
            raise ConfigError(f"sizes: {error}") from None
    return Server(
        engine=engine,
        config=config,
        model=model,
        metrics=metrics,
        sizes=sizes,
        concurrency=ConcurrencyLimit(config.max_concurrent_requests),
    )


def start(server: Server) -> None:
    """Start the engine, which compiles each size first."""
    references = server.engine.pipeline.references
    needed = references is not None and references.needed
    server.engine.start(
        [
            ImageRequest(
                size=size,
                steps=2,
                references=(np.zeros((*size, 3), np.uint8),) if needed else (),
            )
            for size in server.sizes.values()
        ]
    )


def create_app(server: Server) -> FastAPI:
    """The routes; `asgi_app` puts the gate around them."""
    app = new_app(server.config, "A model that draws behind OpenAI's interface.")
    app.state.server = server
    app.include_router(images.router)
    app.include_router(operations.router)
    return app


def asgi_app(app: FastAPI) -> ASGIApp:
    """The app as it is served."""
    server: Server = app.state.server
    return RequestMiddleware(app, server.config, server.metrics.request)
