"""Inference over HTTP, before any framework: read, ask the host, answer."""

import asyncio
from time import monotonic
from typing import Any, Protocol

from fornax.config import ServingCode, ServingError
from fornax.serving.access import Limits
from fornax.serving.events import Events
from fornax.serving.http import bodies
from fornax.serving.http.answers import reply_of, send_packed
from fornax.serving.http.bodies import ClientLeft, Held, LateBody
from fornax.serving.http.heads import Head, read_head
from fornax.serving.http.quick import QuickCall, quick_call
from fornax.serving.http.replies import error_reply, send_reply
from fornax.serving.http.waiting import awaited
from fornax.serving.types import InferRequest, InferResult
from fornax.serving.v2.request import Decoder
from fornax.serving.v2.response import encode
from fornax.serving.v2.shared_memory import SharedMemory
from fornax.serving.v2.wanted import Wanted

__all__ = ["Inference", "Submits"]


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
        self.running = 0
        """Requests that are being answered."""
        self.last: Any = None
        """The connection of the last request that was answered without a task."""

    async def __call__(
        self, scope: Any, receive: Any, send: Any, model: str, version: str = ""
    ) -> None:
        """Answer one request for `model`, whose body is still to come."""
        submitted = False
        try:
            headers = dict(scope["headers"])
            body, received = await self._body(headers, receive, scope)
            head = read_head(headers, model, version)
            request, wanted = self.read(head, body, received)
            submitted = True
            self.running += 1
            try:
                connection = scope.get("fornax.connection")
                async with awaited(self.submit(request), request, scope, receive) as future:
                    result = await future
            finally:
                self.running -= 1
            await send_packed(send, connection, head, *encode(result, wanted))
        except ServingError as error:
            if not submitted and self._events is not None:
                self._events.tell_refused("http", error.code, str(error), model)
            await send_reply(send, reply_of(error))
        except LateBody as error:
            await send_reply(send, error_reply(408, str(error)), close=True)
        except ClientLeft:
            pass
        except Exception as error:
            await send_reply(send, reply_of(error))

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

    def read(self, head: Head, body: bytes, received: float) -> tuple[InferRequest, Wanted]:
        """The request, and how its answer is wanted; ServingError for one that is refused."""
        request, wanted = self._decoder.decode(body, head.text, head.model, head.version, received)
        if head.id and not request.id:
            request.id = head.id
        request.trace = head.trace
        if self.running >= self._limits.max_concurrent_requests:
            raise ServingError(
                ServingCode.RESOURCE_EXHAUSTED,
                f"{self.running} requests are being answered, which is all this server takes; "
                "send this one again later",
            )
        return request, wanted

    def quick(self, scope: Any, model: str, version: str = "") -> QuickCall | None:
        """What answers requests with this scope's head without a task; None: `__call__` must."""
        headers = dict(scope["headers"])
        return quick_call(self, headers, self._limits.max_body_bytes, model, version)

    def submit(self, request: InferRequest) -> "asyncio.Future[InferResult]":
        """The host's; see `Submits`."""
        return self._host.submit(request)
