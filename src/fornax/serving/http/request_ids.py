"""A request's id over HTTP: kept in its scope, and sent back with every response."""

from starlette.types import Message, Scope, Send

from fornax.config.request_id import HEADER, request_id

__all__ = ["request_id_of", "with_request_id"]

_HEADER = HEADER.encode()
_KEY = "request_id"


def with_request_id(scope: Scope, send: Send) -> Send:
    """Give a request its id; returns a `send` that adds it to the response's headers, in place of
    one that is there."""
    given = next((value for name, value in scope["headers"] if name == _HEADER), None)
    name = request_id(given)
    scope.setdefault("state", {})[_KEY] = name
    header = (_HEADER, name.encode())

    async def identified(message: Message) -> None:
        if message["type"] == "http.response.start":
            others = [each for each in message["headers"] if each[0] != _HEADER]
            message = {**message, "headers": [*others, header]}
        await send(message)

    return identified


def request_id_of(scope: Scope) -> str:
    """The id that `with_request_id` gave; empty without it."""
    return scope.get("state", {}).get(_KEY, "")
