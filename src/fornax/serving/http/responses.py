"""HTTP responses: JSON, and errors in the V2 protocol's form."""

import orjson
from starlette.types import Send

from fornax.serving.types import as_serving_error

__all__ = [
    "JSON",
    "Headers",
    "Response",
    "error_body",
    "error_response",
    "failure_response",
    "json_response",
    "send_response",
]

Headers = list[tuple[bytes, bytes]]
Response = tuple[int, Headers, bytes]
"""Status, headers beside the length, body."""

JSON: tuple[bytes, bytes] = (b"content-type", b"application/json")
_RETRY = {429: b"1", 503: b"2"}
"""Seconds after which a client does well to ask again, by status."""


def json_response(document: object, status: int = 200) -> Response:
    """Any plain content."""
    return status, [JSON], orjson.dumps(document)


def error_body(message: str) -> bytes:
    """`{"error": message}`."""
    # Names in a message come from clients, and may hold what is not Unicode.
    text = message.encode("utf-8", "backslashreplace").decode()
    return orjson.dumps({"error": " ".join(text.split())})


def error_response(status: int, message: str) -> Response:
    """The response that refuses a request with `error_body`."""
    headers = [JSON]
    if status in _RETRY:
        headers.append((b"retry-after", _RETRY[status]))
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    return status, headers, error_body(message)


def failure_response(error: Exception) -> Response:
    """The response that tells of an error."""
    known = as_serving_error(error)
    return error_response(known.code.http, str(known))


async def send_response(send: Send, response: Response, *, close: bool = False) -> None:
    """Send a response; `close` ends the connection with it."""
    status, headers, body = response
    headers = [*headers, (b"content-length", b"%d" % len(body))]
    if close:
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
