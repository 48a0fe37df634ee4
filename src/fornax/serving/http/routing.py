"""What the routes share: their context, JSON under any content type, failures in V2's form."""

import dataclasses
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Annotated

import orjson
from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from fornax.serving.access import Limits
from fornax.serving.events import Events
from fornax.serving.http import responses
from fornax.serving.http.responses import error_response, failure_response, json_response
from fornax.serving.http.schemas import ErrorAnswer
from fornax.serving.v2.shared_memory import SharedMemory

if TYPE_CHECKING:
    from fornax.serving.host import Host

__all__ = ["Context", "DocumentedRoute", "ServerContext", "failures", "install_errors", "respond"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerContext:
    """What the routes are built on."""

    host: "Host"
    limits: Limits
    shared_memory: SharedMemory
    metrics: Callable[[], tuple[bytes, str]] | None
    trace_sample_rate: float
    events: Events


async def _context(request: Request) -> ServerContext:
    return request.app.state.context


Context = Annotated[ServerContext, Depends(_context)]

_MEANINGS = {
    400: "The request is not one that is supported.",
    401: "The token is missing or wrong.",
    403: "The call is the administrator's.",
    404: "There is no such model, version, function or path.",
    405: "The path is not for this method.",
    408: "The body did not arrive in time.",
    409: "It is not so that this could be done.",
    413: "The body, or a tensor of it, is too large.",
    429: "Too many requests; Retry-After says when to try again.",
    500: "The server failed.",
    501: "This server does not do that.",
    503: "The server or the model is not ready.",
    504: "The request took too long.",
}


def failures(*statuses: int) -> dict[int | str, dict[str, object]]:
    """The OpenAPI document's part on failures; those of every request come besides."""
    every = {400, 401, 403, 408, 413, 500, *statuses}
    return {
        status: {"model": ErrorAnswer, "description": _MEANINGS[status]} for status in sorted(every)
    }


def respond(document: object) -> Response:
    """Plain content as the response."""
    return _response(json_response(document))


def _response(whole: responses.Response) -> Response:
    status, headers, body = whole
    response = Response(body, status)
    response.raw_headers += headers
    return response


class _JsonRequest(Request):
    async def json(self) -> object:
        """The body, as strict JSON."""
        try:
            return orjson.loads(await self.body())
        except orjson.JSONDecodeError as error:
            raise HTTPException(400, f"the body is not JSON: {error}") from None


class DocumentedRoute(APIRoute):
    """A route as the protocol has it: clients of it send JSON without saying so."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[object, object, Response]]:
        """Wrap the route's own handler."""
        handler = super().get_route_handler()

        async def documented(request: Request) -> Response:
            others = [each for each in request.scope["headers"] if each[0] != b"content-type"]
            headers = [*others, (b"content-type", b"application/json")]
            scope = {**request.scope, "headers": headers}
            try:
                return await handler(_JsonRequest(scope, request.receive))
            except (HTTPException, RequestValidationError):
                raise
            except Exception as error:
                return _response(failure_response(error))

        return documented


def install_errors(app: FastAPI) -> None:
    """Say what FastAPI itself refuses in the protocol's form."""

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path = request.url.path
        message = {
            404: f"{path} is not a path of this server; /openapi.json lists them",
            405: f"{path} does not take {request.method}",
        }.get(error.status_code, str(error.detail))
        response = _response(error_response(error.status_code, message))
        for name, value in (error.headers or {}).items():
            response.headers[name] = value
        return response

    async def validation_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return _response(error_response(400, _sentence(error)))

    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(RequestValidationError, validation_error)


def _sentence(error: RequestValidationError) -> str:
    """The first thing wrong in a body."""
    first = error.errors()[0]
    name = ".".join(str(part) for part in first["loc"] if part not in ("body", "query", "path"))
    match first["type"]:
        case "extra_forbidden":
            return f"{name} is not a key of this call; remove it"
        case "missing" if name:
            return f"{name} is missing; it is required"
        case "missing":
            return "the body is empty; send a JSON object"
    what = first["msg"].removeprefix("Input should be ")
    what = f"it should be {what}" if what != first["msg"] else what
    return f"{name or 'the body'}: {what}"
