"""Inference over HTTP, before any framework: read, ask the host, answer."""

import asyncio
import re
from time import monotonic
from typing import Any, Protocol

from fornax.config import ServingCode, ServingError
from fornax.serving.access import Limits
from fornax.serving.events import Events
from fornax.serving.http import bodies
from fornax.serving.http.bodies import ClientLeft, Held, LateBody
from fornax.serving.http.replies import JSON, Headers, error_reply, send_reply, unexpected
from fornax.serving.types import InferRequest, InferResult
from fornax.serving.v2.datatypes import Raw, refuse
from fornax.serving.v2.request import Decoder
from fornax.serving.v2.response import encode
from fornax.serving.v2.shared_memory import SharedMemory

__all__ = ["Inference", "Submits"]

_BINARY = (b"content-type", b"application/octet-stream")
_ID = re.compile(rb"[\x21-\x7e]{1,128}")
_SIZE = re.compile(rb"[0-9]{1,18}")


class Submits(Protocol):
    """What answers requests."""

    def submit(self, request: InferRequest) -> "asyncio.Future[InferResult]":
        """Accept a request, or raise ServingError at once; cancelling the future drops it."""


class Inference:
    """The infer route; of one event loop."""

    def __init__(
        self,
        host: Submits,
        limits: Limits,
        shared_memory: SharedMemory,
        events: Events | None = None,
        held: Held | None = None,
    ):
        self._host = host
        self._limits = limits
        self._decoder = Decoder(limits, shared_memory)
        self._events = events
        self._held = held or Held(limits.max_body_bytes)
        self._running = 0

    async def __call__(
        self, scope: Any, receive: Any, send: Any, model: str, version: str = ""
    ) -> None:
        """Answer one request for `model`, whose body is still to come."""
        submitted = False
        try:
            headers = dict(scope["headers"])
            body, received = await self._body(headers, receive, scope)
            size = headers.get(b"inference-header-content-length")
            request, wanted = self._decoder.decode(
                body, None if size is None else _size(size), model, version, received
            )
            if b"x-request-id" in headers and not request.id:
                request.id = _id(headers)
            request.trace = headers.get(b"traceparent")
            self._admit()
            submitted = True
            self._running += 1
            try:
                connection = scope.get("fornax.connection")
                result = await self._result(request, connection, receive)
            finally:
                self._running -= 1
            text, binary = encode(result, wanted)
            await _send(send, connection, headers, text, binary)
        except ServingError as error:
            if not submitted and self._events is not None:
                self._events.tell_refused("http", error.code, str(error), model)
            await send_reply(send, error_reply(error.code.http, str(error)))
        except LateBody as error:
            await send_reply(send, error_reply(408, str(error)), close=True)
        except ClientLeft:
            pass
        except Exception as error:
            await send_reply(send, error_reply(500, str(unexpected(error))))

    async def _body(
        self, headers: dict[bytes, bytes], receive: Any, scope: Any
    ) -> tuple[bytes, float]:
        """The body, and when its last byte had come."""
        most = self._limits.max_body_bytes
        body = await bodies.read(receive, scope, self._limits, most, self._held)
        received = monotonic()
        coding = headers.get(b"content-encoding")
        if coding is not None:
            body = await bodies.inflate(body, coding, most)
            self._held.take(scope, len(body))
        return body, received

    def _admit(self) -> None:
        if self._running >= self._limits.max_concurrent_requests:
            raise ServingError(
                ServingCode.RESOURCE_EXHAUSTED,
                f"{self._running} requests are being answered, which is all this server takes; "
                "send this one again later",
            )

    async def _result(self, request: InferRequest, connection: Any, receive: Any) -> InferResult:
        """The host's answer; the request is cancelled when its client leaves or its time is up."""
        future = self._host.submit(request)
        watch = timer = None
        if connection is not None:
            connection.pending = future
        else:
            watch = asyncio.ensure_future(_cancel_when_gone(receive, future))
        if request.deadline is not None:
            left = max(0.0, request.deadline - monotonic())
            timer = asyncio.get_running_loop().call_later(left, future.cancel)
        try:
            return await future
        except asyncio.CancelledError:
            if request.deadline is not None and monotonic() >= request.deadline:
                raise ServingError(
                    ServingCode.DEADLINE_EXCEEDED,
                    f"the request's {request.deadline - request.received:g} s are over",
                ) from None
            if connection.pending is None if watch is None else watch.done():
                raise ClientLeft from None
            # Else the host dropped it, or uvicorn ends this task when the time to drain is over.
            raise ServingError(
                ServingCode.UNAVAILABLE, "the server stopped before it answered; send this again"
            ) from None
        finally:
            if connection is not None:
                connection.pending = None
            if watch is not None:
                watch.cancel()
            if timer is not None:
                timer.cancel()


async def _cancel_when_gone(receive: Any, future: "asyncio.Future[InferResult]") -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    future.cancel()


def _size(header: bytes) -> int:
    if _SIZE.fullmatch(header) is None:
        raise refuse("Inference-Header-Content-Length is no number of bytes")
    return int(header)


def _id(headers: dict[bytes, bytes]) -> str:
    name = headers[b"x-request-id"]
    return name.decode("ascii") if _ID.fullmatch(name) else ""


async def _send(
    send: Any, connection: Any, asked: dict[bytes, bytes], text: bytes, binary: list[Raw]
) -> None:
    headers: Headers
    if binary:
        headers = [_BINARY, (b"inference-header-content-length", b"%d" % len(text))]
    else:
        headers = [JSON]
    body = [text, *binary]
    if b"accept-encoding" in asked:
        coding = bodies.accepted_coding(asked[b"accept-encoding"])
        if coding:
            body = [await bodies.deflate(b"".join(body), coding)]
            headers.append((b"content-encoding", coding))
    if b"x-request-id" in asked and (name := _id(asked)):
        headers.append((b"x-request-id", name.encode()))
    headers.append((b"content-length", b"%d" % sum(map(len, body))))
    cycle = getattr(send, "__self__", None)
    if connection is None or cycle is None or not connection.answer(cycle, 200, headers, body):
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"".join(body)})
