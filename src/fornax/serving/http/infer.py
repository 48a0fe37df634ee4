"""Inference over HTTP, before any framework: read, ask the host, answer."""

import asyncio
import re
from time import monotonic
from typing import Any, Protocol

from fornax.config import ServingCode, ServingError
from fornax.serving.access import Limits
from fornax.serving.events import Events
from fornax.serving.failures import as_serving_error
from fornax.serving.http import bodies
from fornax.serving.http.bodies import ClientLeft, Held, LateBody
from fornax.serving.http.replies import JSON, Headers, Reply, error_reply, send_reply
from fornax.serving.types import InferRequest, InferResult
from fornax.serving.v2.datatypes import Raw, refuse
from fornax.serving.v2.request import Decoder
from fornax.serving.v2.response import encode
from fornax.serving.v2.shared_memory import SharedMemory
from fornax.serving.v2.wanted import Wanted

__all__ = ["Inference", "Submits"]

_BINARY = (b"content-type", b"application/octet-stream")
_ID = re.compile(rb"[\x21-\x7e]{1,128}")
_SIZE = re.compile(rb"[0-9]{1,18}")
_EARLY = 0.005
"""Seconds by which a timer may come before its time: loops count in milliseconds."""


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
            request, wanted = self._request(headers, body, model, version, received)
            submitted = True
            self._running += 1
            try:
                connection = scope.get("fornax.connection")
                result = await self._result(request, connection, receive)
            finally:
                self._running -= 1
            await _send(send, connection, headers, *encode(result, wanted))
        except ServingError as error:
            if not submitted and self._events is not None:
                self._events.tell_refused("http", error.code, str(error), model)
            await send_reply(send, _reply(error))
        except LateBody as error:
            await send_reply(send, error_reply(408, str(error)), close=True)
        except ClientLeft:
            pass
        except Exception as error:
            await send_reply(send, _reply(error))

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

    def _request(
        self, headers: dict[bytes, bytes], body: bytes, model: str, version: str, received: float
    ) -> tuple[InferRequest, Wanted]:
        """The request, and how its answer is wanted; ServingError for one that is refused."""
        size = headers.get(b"inference-header-content-length")
        request, wanted = self._decoder.decode(
            body, None if size is None else _size(size), model, version, received
        )
        if b"x-request-id" in headers and not request.id:
            request.id = _id(headers)
        request.trace = headers.get(b"traceparent")
        if self._running >= self._limits.max_concurrent_requests:
            raise ServingError(
                ServingCode.RESOURCE_EXHAUSTED,
                f"{self._running} requests are being answered, which is all this server takes; "
                "send this one again later",
            )
        return request, wanted

    def quick(self, cycle: Any, connection: Any, model: str, version: str = "") -> bool:
        """Answer uvicorn's `cycle`, whose body is here, without a task of its own.

        False: nothing was done, and the request must go the usual way, since it is wrong, too
        large, is compressed, or wants its answer compressed.
        """
        headers = dict(cycle.scope["headers"])
        if b"content-encoding" in headers or _coding(headers):
            return False
        if len(cycle.body) > self._limits.max_body_bytes:
            return False
        try:
            request, wanted = self._request(headers, bytes(cycle.body), model, version, monotonic())
        except Exception:
            return False  # the usual way comes to the same, and says so
        try:
            future = self._host.submit(request)
        except Exception as error:
            _answer(connection, cycle, *_failure(error))
            return True
        self._running += 1
        connection.pending = future
        timer = None
        if request.deadline is not None:
            left = max(0.0, request.deadline - monotonic())
            timer = asyncio.get_running_loop().call_later(left, future.cancel)

        def finish(future: "asyncio.Future[InferResult]") -> None:
            self._running -= 1
            if timer is not None:
                timer.cancel()
            gone, connection.pending = connection.pending is None, None
            try:
                reply = 200, *_pack(headers, *encode(future.result(), wanted))
            except asyncio.CancelledError:
                reply = _failure(_cancelled(request))
            except Exception as error:
                reply = _failure(error)
            if not gone:
                _answer(connection, cycle, *reply)

        future.add_done_callback(finish)
        return True

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
            late = _late(request)
            gone = connection.pending is None if watch is None else watch.done()
            if gone and not late:
                raise ClientLeft from None
            raise _cancelled(request) from None
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


def _coding(headers: dict[bytes, bytes]) -> bytes:
    """The coding that the client asks for; empty: none."""
    accepted = headers.get(b"accept-encoding")
    return b"" if accepted is None else bodies.accepted_coding(accepted)


def _late(request: InferRequest) -> bool:
    return request.deadline is not None and monotonic() >= request.deadline - _EARLY


def _cancelled(request: InferRequest) -> ServingError:
    """What became of a request that was cancelled, whose client is still there."""
    if request.deadline is not None and _late(request):
        seconds = request.deadline - request.received
        return ServingError(ServingCode.DEADLINE_EXCEEDED, f"the request's {seconds:g} s are over")
    # The host dropped it, or the time to drain was over.
    return ServingError(
        ServingCode.UNAVAILABLE, "the server stopped before it answered; send this again"
    )


def _reply(error: Exception) -> Reply:
    known = as_serving_error(error)
    return error_reply(known.code.http, str(known))


def _failure(error: Exception) -> tuple[int, Headers, list[Raw]]:
    status, headers, body = _reply(error)
    return status, [*headers, (b"content-length", b"%d" % len(body))], [body]


def _pack(asked: dict[bytes, bytes], text: bytes, binary: list[Raw]) -> tuple[Headers, list[Raw]]:
    """Headers and body of an answer that is not compressed."""
    headers: Headers
    if binary:
        headers = [_BINARY, (b"inference-header-content-length", b"%d" % len(text))]
    else:
        headers = [JSON]
    if b"x-request-id" in asked and (name := _id(asked)):
        headers.append((b"x-request-id", name.encode()))
    body: list[Raw] = [text, *binary]
    headers.append((b"content-length", b"%d" % sum(map(len, body))))
    return headers, body


def _answer(connection: Any, cycle: Any, status: int, headers: Headers, body: list[Raw]) -> None:
    if not connection.answer(cycle, status, headers, body):
        connection.start(_whole(cycle.send, status, headers, body))


async def _whole(send: Any, status: int, headers: Headers, body: list[Raw]) -> None:
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": b"".join(body)})


async def _send(
    send: Any, connection: Any, asked: dict[bytes, bytes], text: bytes, binary: list[Raw]
) -> None:
    headers, body = _pack(asked, text, binary)
    if coding := _coding(asked):
        packed = await bodies.deflate(b"".join(body), coding)
        headers[-1] = (b"content-length", b"%d" % len(packed))
        headers.append((b"content-encoding", coding))
        body = list[Raw]([packed])
    cycle = getattr(send, "__self__", None)
    if connection is None or cycle is None or not connection.answer(cycle, 200, headers, body):
        await _whole(send, 200, headers, body)
