"""Errors as OpenAI's clients know them: `{"error": {"message", "type", "param", "code"}}`."""

import dataclasses
import re

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.responses import Response

from fornax.config import EngineError
from fornax.llm.sampling_params import SamplingParams

CLIENT_CLOSED_REQUEST = 499
"""Status in the log and the metrics when the client disconnected before the answer."""
_FIELDS = {field.name for field in dataclasses.fields(SamplingParams)} | {"prompt", "lora_path"}
"""What messages of the engine may begin with that is a field of a request too."""
_LONGEST = 2000
"""Characters of a message: some repeat what a client sent."""
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class ApiError(HTTPException):
    """An error response: a status, a sentence, the field at fault."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ):
        headers = None if retry_after is None else {"Retry-After": str(max(1, round(retry_after)))}
        if len(message) > _LONGEST:
            message = f"{message[:_LONGEST]}…"
        super().__init__(status, message, headers)
        self.message = message
        self.param = param and param[:_LONGEST]
        self.code = code

    def body(self) -> dict[str, object]:
        """OpenAI's error object."""
        kind = _TYPES.get(self.status_code, "internal_server_error")
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.code if self.code is not None else self.status_code,
            }
        }

    def response(self) -> Response:
        """The whole answer."""
        return json_response(self.body(), self.status_code, dict(self.headers or {}))


def json_response(
    content: object, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """Any plain content as JSON."""
    return Response(to_json(content), status, headers, media_type="application/json")


def from_engine(error: EngineError) -> ApiError:
    """A request the engine refuses: 400, with the field that its message names first."""
    message = str(error)
    named = re.match(r"[a-z][a-z0-9_]*", message)
    param = named.group() if named and named.group() in _FIELDS else None
    return ApiError(400, message, param=param)


def translate(error: Exception) -> ApiError:
    """Any failure of a request as an error response."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineError):
        return from_engine(error)
    if isinstance(error, TimeoutError):
        return ApiError(504, "the request took longer than this server allows", code="timeout")
    return ApiError(500, f"the server failed on this request ({type(error).__name__})")


_BRANCH = re.compile(r"[\[\-A-Z(]|^(str|int|float|bool|dict)$")


def install(app: FastAPI) -> None:
    """Make every error of the app an OpenAI error object."""

    async def api_error(request: Request, error: Exception) -> Response:
        return translate(error).response()

    async def http_error(request: Request, error: Exception) -> Response:
        if isinstance(error, ApiError):
            return error.response()
        assert isinstance(error, HTTPException)
        answer = ApiError(error.status_code, _sentence(error, request)).response()
        answer.headers.update(error.headers or {})
        return answer

    async def validation_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return from_validation(error).response()

    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(RequestValidationError, validation_error)
    app.add_exception_handler(EngineError, api_error)
    app.add_exception_handler(TimeoutError, api_error)
    app.add_exception_handler(Exception, api_error)


def _sentence(error: HTTPException, request: Request) -> str:
    path = request.url.path
    if error.status_code == 404:
        return f"{path} is not a path of this server; /openapi.json lists them"
    if error.status_code == 405:
        return f"{path} does not take {request.method}"
    return str(error.detail)


def from_validation(error: RequestValidationError | ValidationError) -> ApiError:
    """The first thing wrong in a body, as one sentence that names its field."""
    first = error.errors()[0]
    place = [part for part in first["loc"] if part not in ("body", "query", "path")]
    # A union's own branches ("list[int]", "str") say nothing to the client.
    names = [str(part) for part in place if not _BRANCH.search(str(part))]
    name = ".".join(names)
    match first["type"]:
        case "extra_forbidden":
            message = f"{name} is not a field of this request; remove it"
        case "missing" if name:
            message = f"{name} is missing; it is required"
        case "missing":
            message = "the body is empty; send a JSON object with content-type application/json"
        case "model_attributes_type" | "model_type" | "dict_type" if not name:
            message = "the body is not a JSON object; send one, with content-type application/json"
        case _:
            what = first["msg"].removeprefix("Input should be ")
            message = f"{name}: it should be {what}" if what != first["msg"] else f"{name}: {what}"
    return ApiError(400, message, param=names[0] if names else None)
