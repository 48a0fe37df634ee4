"""How bodies are read, and how the OpenAPI document describes answers."""

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic_core import from_json

from fornax.llm.server.errors import ApiError
from fornax.llm.server.protocol.base import ErrorAnswer

__all__ = ["StrictRoute", "failures", "stream_of"]


class _StrictRequest(Request):
    """A request whose body is strict JSON: UTF-8, no lone surrogates, no NaN, not too deep."""

    async def json(self) -> Any:
        """The body; 400 when it is not that, or has more values than the limits allow."""
        server = self.app.state.server
        body = await self.body()
        server.config.request_limits.check_json(body, server.engine.max_model_len)
        try:
            return from_json(body, allow_inf_nan=False)
        except ValueError as error:
            raise ApiError(400, f"the body is no JSON: {error}", code="invalid_json") from None


class StrictRoute(APIRoute):
    """A route that reads strict JSON."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Hand the strict request to the route's own handler."""
        handler = super().get_route_handler()

        async def strict(request: Request) -> Response:
            return await handler(_StrictRequest(request.scope, request.receive))

        return strict


_MEANINGS = {
    400: "The request is not one that can be honoured; `param` names the field.",
    401: "The API key is missing or wrong.",
    404: "There is no such model.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    429: "Too many requests; Retry-After says when to try again.",
    500: "The server failed.",
    503: "The engine is not ready, sleeps, stops or died.",
    504: "The request took too long.",
}


def failures(*statuses: int, body: bool = True) -> dict[int | str, dict[str, Any]]:
    """The OpenAPI document's part on failures; those of any request with a body come besides."""
    every = {401, 500, *statuses, *((400, 408, 413) if body else ())}
    return {
        status: {"model": ErrorAnswer, "description": _MEANINGS[status]} for status in sorted(every)
    }


def stream_of(description: str) -> dict[str, Any]:
    """The OpenAPI document's part on an answer that may be a stream."""
    return {
        "description": f"{description}; with `stream`, server-sent events that end with `[DONE]`.",
        "content": {"text/event-stream": {"schema": {"type": "string"}}},
    }
