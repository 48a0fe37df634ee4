"""Inferences answered without a task: their bodies are here, nothing is compressed."""

import asyncio
from collections.abc import Mapping
from time import monotonic
from typing import Any, Protocol

from fornax.config import ServingError
from fornax.serving.http.answers import failure, pack, send_whole
from fornax.serving.http.heads import Head, read_head
from fornax.serving.types import InferRequest, InferResult
from fornax.serving.v2.response import encode
from fornax.serving.v2.wanted import Wanted

__all__ = ["Inferences", "QuickCall", "quick_call"]


class Inferences(Protocol):
    """What reads requests, has them answered, and knows of the others."""

    running: int
    last: Any
    """The connection of the last request."""

    def read(self, head: Head, body: bytes, received: float) -> tuple[InferRequest, Wanted]: ...

    def submit(self, request: InferRequest) -> "asyncio.Future[InferResult]": ...

    def cancelled(self, request: InferRequest) -> ServingError: ...


def quick_call(
    inferences: Inferences, headers: Mapping[bytes, bytes], most: int, model: str, version: str = ""
) -> "QuickCall | None":
    """What answers requests with these headers; None: they must go the usual way.

    That is for those that are compressed, want their answer so, or are wrong.
    """
    if b"content-encoding" in headers:
        return None
    try:
        head = read_head(headers, model, version)
    except ServingError:
        return None
    return None if head.accepted else QuickCall(inferences, head, most)


class QuickCall:
    """Answers requests that have one and the same head."""

    __slots__ = ("_head", "_inferences", "_most")

    def __init__(self, inferences: Inferences, head: Head, most: int):
        self._inferences = inferences
        self._head = head
        self._most = most

    def __call__(self, cycle: Any, connection: Any, body: bytes) -> bool:
        """Answer uvicorn's `cycle`; False: nothing was done, since the request is wrong."""
        inferences = self._inferences
        if len(body) > self._most:
            return False
        try:
            request, wanted = inferences.read(self._head, body, monotonic())
        except Exception:
            return False  # the usual way comes to the same, and says so
        request.lone = inferences.last is connection and not inferences.running
        inferences.last = connection
        try:
            future = inferences.submit(request)
        except Exception as error:
            _answer(connection, cycle, *failure(error))
            return True
        if future.done():
            self._finish(future, request, wanted, cycle, connection)
            return True
        inferences.running += 1
        connection.pending = future
        timer = None
        if request.deadline is not None:
            left = max(0.0, request.deadline - monotonic())
            timer = asyncio.get_running_loop().call_later(left, future.cancel)

        def finish(future: "asyncio.Future[InferResult]") -> None:
            inferences.running -= 1
            if timer is not None:
                timer.cancel()
            gone, connection.pending = connection.pending is None, None
            if gone:
                future.cancelled() or future.exception()  # nobody is to be told of it
            else:
                self._finish(future, request, wanted, cycle, connection)

        future.add_done_callback(finish)
        return True

    def _finish(
        self,
        future: "asyncio.Future[InferResult]",
        request: InferRequest,
        wanted: Wanted,
        cycle: Any,
        connection: Any,
    ) -> None:
        try:
            reply = 200, *pack(self._head, *encode(future.result(), wanted))
        except asyncio.CancelledError:
            reply = failure(self._inferences.cancelled(request))
        except Exception as error:
            reply = failure(error)
        _answer(connection, cycle, *reply)


def _answer(connection: Any, cycle: Any, status: int, headers: Any, body: Any) -> None:
    if not connection.answer(cycle, status, headers, body):
        connection.start(send_whole(cycle.send, status, headers, body))
