"""The generate extension: an answer as plain JSON, whole or as server-sent events."""

import asyncio
from time import monotonic
from typing import Any

from starlette.routing import Route

from fornax.config import ServingCode, ServingError
from fornax.serving.access import Limits
from fornax.serving.http import bodies
from fornax.serving.http.answers import reply_of
from fornax.serving.http.bodies import ClientLeft
from fornax.serving.http.generate_json import read_generate, write_generate
from fornax.serving.http.heads import Head, read_head
from fornax.serving.http.parts import Parts
from fornax.serving.http.replies import JSON, Headers, send_reply
from fornax.serving.http.waiting import awaited
from fornax.serving.types import InferRequest, InferResult

__all__ = ["generate_routes"]

_MODEL = "/v2/models/{model}"
_VERSION = "/v2/models/{model}/versions/{version}"
_MOST = 2**20
"""Bytes of a body, also after decompression."""
_EVENTS: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
]


def generate_routes(parts: Parts) -> list[Route]:
    """The routes; FastAPI has no part in them."""
    app = _Generate(parts)
    return [
        Route(model + call, app, methods=["POST"])
        for model in (_MODEL, _VERSION)
        for call in ("/generate", "/generate_stream")
    ]


class _Generate:
    """The app; of one event loop."""

    def __init__(self, parts: Parts):
        self._host = parts.host
        self._events = parts.events
        self._running = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request, whose body has been read."""
        names = scope["path_params"]
        streams = scope["path"].endswith("_stream")
        request = None
        try:
            head = read_head(dict(scope["headers"]), names["model"], names.get("version", ""))
            request = await self._read(head, scope, receive, streams)
            self._running += 1
            try:
                if streams:
                    await self._stream(request, head, scope, receive, send)
                else:
                    await self._whole(request, head, scope, receive, send)
            finally:
                self._running -= 1
        except ClientLeft:
            pass
        except Exception as error:
            if request is None and self._events is not None and isinstance(error, ServingError):
                self._events.tell_refused("http", error.code, str(error), names["model"])
            await send_reply(send, reply_of(error))

    async def _read(self, head: Head, scope: Any, receive: Any, streams: bool) -> InferRequest:
        limits = _limits(scope)
        body = (await receive())["body"]
        received = monotonic()
        coding = dict(scope["headers"]).get(b"content-encoding")
        if coding is not None:
            body = await bodies.inflate(body, coding, min(_MOST, limits.max_body_bytes))
        if self._running >= limits.max_concurrent_requests:
            raise ServingError(
                ServingCode.RESOURCE_EXHAUSTED,
                f"{self._running} requests are being answered, which is all this server takes; "
                "send this one again later",
            )
        return read_generate(body, head, self._host, limits, received, streams=streams)

    async def _whole(
        self, request: InferRequest, head: Head, scope: Any, receive: Any, send: Any
    ) -> None:
        async with awaited(self._host.submit(request), request, scope, receive) as future:
            body = write_generate(await future)
        await send_reply(send, (200, [JSON, *_named(head)], body))

    async def _stream(
        self, request: InferRequest, head: Head, scope: Any, receive: Any, send: Any
    ) -> None:
        """An event for each piece; what goes wrong before the first is told as of any request."""
        pieces: asyncio.Queue[InferResult | None] = asyncio.Queue()
        request.pieces = pieces.put_nowait
        begun = False

        async def event(data: bytes, last: bool) -> None:
            nonlocal begun
            if not begun:
                begun = True
                headers = [*_EVENTS, *_named(head)]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
            data = b"data: %b\n\n" % data
            await send({"type": "http.response.body", "body": data, "more_body": not last})

        try:
            async with awaited(self._host.submit(request), request, scope, receive) as future:
                future.add_done_callback(lambda _: pieces.put_nowait(None))
                while (piece := await pieces.get()) is not None:
                    await event(write_generate(piece, done=False), last=False)
                last = write_generate(await future, done=True)
            await event(last, last=True)
        except ClientLeft:
            raise
        except Exception as error:
            if not begun:
                raise
            await event(reply_of(error)[2], last=True)


def _limits(scope: Any) -> Limits:
    """Those of the connection's server."""
    connection = scope.get("fornax.connection")
    return Limits() if connection is None else connection.limits


def _named(head: Head) -> Headers:
    return [(b"x-request-id", head.id.encode())] if head.id else []
