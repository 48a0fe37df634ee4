"""What apps with OpenAI's interface share: the app's frame, routes that read strict JSON."""

from collections.abc import Callable, Coroutine
from typing import Annotated

from fastapi import Depends, FastAPI, Request, Response
from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.middleware.cors import CORSMiddleware

from fornax import __version__
from fornax.llm.server import errors
from fornax.llm.server.config import HttpConfig
from fornax.llm.server.errors import ApiError
from fornax.llm.server.middleware import RequestContext

__all__ = ["ContextDep", "StrictRoute", "new_app"]


def new_app(config: HttpConfig, summary: str) -> FastAPI:
    """An app without routes: its documents, errors as OpenAI's, and origins.

    Its `state.server` is set by the caller; `check_json(body)` of it refuses bodies of too many
    values, see `StrictRoute`.
    """
    app = FastAPI(
        title="Fornax",
        version=__version__,
        summary=summary,
        openapi_url=None if config.disable_fastapi_docs else "/openapi.json",
        docs_url=None if config.disable_fastapi_docs else "/docs",
        redoc_url=None,
        root_path=config.root_path,
        generate_unique_id_function=lambda route: route.name,
    )
    errors.install(app)
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(config.allowed_origins),
            allow_methods=list(config.allowed_methods),
            allow_headers=list(config.allowed_headers),
            allow_credentials=config.allow_credentials,
        )
    return app


async def _context(request: Request) -> RequestContext:
    return request.state.context


ContextDep = Annotated[RequestContext, Depends(_context)]


class _StrictRequest(Request):
    """A request whose body is strict JSON: UTF-8, no lone surrogates, no NaN, not too deep."""

    async def json(self) -> object:
        """The body; 400 when it is not that, or has more values than the server allows."""
        body = await self.body()
        self.app.state.server.check_json(body)
        try:
            return from_json(body, allow_inf_nan=False)
        except ValueError as error:
            raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from None


class StrictRoute(APIRoute):
    """A route that reads strict JSON."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[object, object, Response]]:
        """Hand the strict request to the route's own handler."""
        handler = super().get_route_handler()

        async def strict(request: Request) -> Response:
            return await handler(_StrictRequest(request.scope, request.receive))

        return strict
