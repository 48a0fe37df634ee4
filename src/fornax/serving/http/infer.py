"""Inference over HTTP, before any framework: read, ask the host, respond."""

import asyncio
import re
from collections.abc import Mapping
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

from starlette.types import Receive, Scope, Send

from fornax.config import ServingCode, ServingError
from fornax.serving.access import Limits
from fornax.serving.events import Events
from fornax.serving.http import bodies
from fornax.serving.http.bodies import ClientLeft, HeldBodies
from fornax.serving.http.request_ids import request_id_of
from fornax.serving.http.responses import (
    JSON,
    Headers,
    Response,
    failure_response,
    send_response,
)
from fornax.serving.types import InferRequest, InferResult
from fornax.serving.v2.datatypes import Raw, refuse
from fornax.serving.v2.parameters import RequestedOutputs
from fornax.serving.v2.request import Decoder
from fornax.serving.v2.response import encode
from fornax.serving.v2.shared_memory import SharedMemory

if TYPE_CHECKING:
    from fornax.serving.host import Host

__all__ = ["InferHeaders", "Inference", "ResponseWait", "check_room", "read_headers"]

_ID = re.compile(rb"[\x21-\x7e]{1,128}")
_SIZE = re.compile(rb"[0-9]{1,18}")
_BINARY = (b"content-type", b"application/octet-stream")
_UNWATCHED = 0.01
"""Seconds in which a response may come before the client is watched for leaving: the task that
watches costs as much as a tenth of a small request."""
_EARLY = 0.005
"""Seconds by which a timer may come before its time: loops count in milliseconds."""


class InferHeaders(NamedTuple):
    """What the headers of an inference say."""

    json_size: int | None
    """Bytes of the body's JSON; None: all of it."""
    id: str
    """Empty: none, or none that is fit to be repeated."""
    trace: bytes | None
    """The caller's trace context."""
    accepted: bytes
    """The coding that the client asks its response in; empty: none."""


def read_headers(headers: Mapping[bytes, bytes]) -> InferHeaders:
    """Read them; ServingError for a size of the JSON that is not a number."""
    size = headers.get(b"inference-header-content-length")
    if size is not None and _SIZE.fullmatch(size) is None:
        raise refuse("Inference-Header-Content-Length is not a number of bytes")
    name = headers.get(b"x-request-id", b"")
    return InferHeaders(
        None if size is None else int(size),
        name.decode("ascii") if _ID.fullmatch(name) else "",
        headers.get(b"traceparent"),
        bodies.accepted_coding(headers.get(b"accept-encoding", b"")),
    )


class ResponseWait:
    """Waits for the host's response to a request, which is cancelled when its client leaves, its
    time is up, or by an error inside the context.

    Raises ClientLeft, or ServingError for the time and for a host that stops.
    """

    __slots__ = ("_future", "_receive", "_request", "_timer", "_watch", "_watch_timer")

    def __init__(
        self, future: "asyncio.Future[InferResult]", request: InferRequest, receive: Receive
    ):
        self._future = future
        self._request = request
        self._receive = receive
        loop = asyncio.get_running_loop()
        self._watch: asyncio.Task[None] | None = None
        self._watch_timer = loop.call_later(_UNWATCHED, self._begin_watching)
        self._timer: asyncio.TimerHandle | None = None
        if request.deadline is not None:
            left = max(0.0, request.deadline - monotonic())
            self._timer = loop.call_later(left, future.cancel)

    def _begin_watching(self) -> None:
        self._watch = asyncio.ensure_future(_cancel_when_gone(self._receive, self._future))

    def __enter__(self) -> "asyncio.Future[InferResult]":
        return self._future

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        gone = self._watch is not None and self._watch.done()
        self._watch_timer.cancel()
        if self._watch is not None:
            self._watch.cancel()
        self._future.cancel()  # useful where its result could not be sent
        if self._timer is not None:
            self._timer.cancel()
        if isinstance(error, asyncio.CancelledError):
            if gone and not self._late():
                raise ClientLeft from None
            raise self._cancelled() from None

    def _cancelled(self) -> ServingError:
        """What became of a request that was cancelled, whose client is still there."""
        if self._request.deadline is not None and self._late():
            seconds = self._request.deadline - self._request.received
            return ServingError(
                ServingCode.DEADLINE_EXCEEDED, f"the request's {seconds:g} s are over"
            )
        # The host dropped it, or the time to drain was over.
        return ServingError(
            ServingCode.UNAVAILABLE, "the server stopped before it answered; send this again"
        )

    def _late(self) -> bool:
        deadline = self._request.deadline
        return deadline is not None and monotonic() >= deadline - _EARLY


async def _cancel_when_gone(receive: Receive, future: "asyncio.Future[InferResult]") -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    future.cancel()


class Inference:
    """The infer route; of one event loop."""

    def __init__(
        self,
        host: "Host",
        limits: Limits,
        shared_memory: SharedMemory,
        events: Events,
    ):
        self._host = host
        self._limits = limits
        self._decoder = Decoder(limits, shared_memory)
        self._events = events
        self._running = 0

    async def __call__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        held: HeldBodies,
        model: str,
        version: str = "",
    ) -> None:
        """Respond to one request for `model`, whose body is still to come."""
        request = None
        try:
            headers = dict(scope["headers"])
            body, received = await self._body(headers, receive, held)
            head = read_headers(headers)
            check_room(self._running, self._limits)
            request, outputs = self._decoder.decode(body, head.json_size, model, version, received)
            request.id = request.id or head.id
            request.request_id = request_id_of(scope)
            request.trace = head.trace
            response = await self._answer(request, outputs, head, receive)
        except (bodies.LateBody, ClientLeft):
            raise
        except Exception as error:
            if request is None and isinstance(error, ServingError):
                self._events.tell_refused(
                    "http", error.code, str(error), model, request_id=request_id_of(scope)
                )
            response = failure_response(error)
        await send_response(send, response)

    async def _answer(
        self, request: InferRequest, outputs: RequestedOutputs, head: InferHeaders, receive: Receive
    ) -> Response:
        self._running += 1
        try:
            with ResponseWait(self._host.submit(request), request, receive) as future:
                return await _response(head, *encode(await future, outputs))
        finally:
            self._running -= 1

    async def _body(
        self, headers: dict[bytes, bytes], receive: Receive, held: HeldBodies
    ) -> tuple[bytes, float]:
        """The body, and when its last byte had come."""
        most = self._limits.max_body_bytes
        body = await bodies.read(receive, self._limits, most, held)
        received = monotonic()
        coding = headers.get(b"content-encoding")
        if coding is not None:
            body = await bodies.inflate(body, coding, most)
            held.take(len(body))
        return body, received


def check_room(running: int, limits: Limits) -> None:
    """Raise ServingError where as many requests are being answered as may be."""
    if running >= limits.max_concurrent_requests:
        raise ServingError(
            ServingCode.RESOURCE_EXHAUSTED,
            f"{running} requests are being answered, which is all this server takes; "
            "send this one again later",
        )


async def _response(head: InferHeaders, text: bytes, binary: list[Raw]) -> Response:
    """A result, compressed if that was asked for."""
    headers: Headers = [JSON]
    if binary:
        headers = [_BINARY, (b"inference-header-content-length", b"%d" % len(text))]
    body = b"".join([text, *binary])
    if head.accepted:
        body = await bodies.deflate(body, head.accepted)
        headers.append((b"content-encoding", head.accepted))
    return 200, headers, body
