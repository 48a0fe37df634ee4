"""Inferences answered without a task: their bodies are here, nothing is compressed."""

import asyncio
from collections.abc import Mapping
from time import monotonic
from typing import Any, NamedTuple, Protocol

import numpy as np

from fornax.config import ServingError
from fornax.serving.http.answers import failure, pack, send_whole
from fornax.serving.http.heads import Head, read_head
from fornax.serving.http.replies import Headers, lines_of
from fornax.serving.http.waiting import cancelled
from fornax.serving.types import InferRequest, InferResult
from fornax.serving.v2.datatypes import Raw, encode_raw
from fornax.serving.v2.response import encode
from fornax.serving.v2.wanted import Output, Wanted

__all__ = ["Inferences", "QuickCall", "quick_call"]


class Inferences(Protocol):
    """What reads requests, has them answered, and knows of the others."""

    running: int
    last: Any
    """The connection of the last request."""

    def read(self, head: Head, body: bytes, received: float) -> tuple[InferRequest, Wanted]: ...

    def submit(self, request: InferRequest) -> "asyncio.Future[InferResult]": ...


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


_Packed = tuple[Headers, bytes, list[Raw]]
"""An answer's headers, the same as lines, and its body."""


class _Last(NamedTuple):
    wanted: Wanted
    version: str
    layout: list[Any]
    headers: Headers
    lines: bytes
    text: bytes


class QuickCall:
    """Answers requests that have one and the same head."""

    __slots__ = ("_head", "_inferences", "_last", "_most")

    def __init__(self, inferences: Inferences, head: Head, most: int):
        self._inferences = inferences
        self._head = head
        self._most = most
        self._last: _Last | None = None
        """What the last answer had before its tensors."""

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
            self._fail(cycle, connection, error)
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
            result = future.result()
            packed = self._known(result, wanted)
            if packed is None:
                text, binary = encode(result, wanted)
                packed = self._remember(result, wanted, *pack(self._head, text, binary))
            headers, lines, body = packed
        except asyncio.CancelledError:
            self._fail(cycle, connection, cancelled(request))
        except Exception as error:
            self._fail(cycle, connection, error)
        else:
            _answer(connection, cycle, 200, headers, lines, body)

    def _known(self, result: InferResult, wanted: Wanted) -> _Packed | None:
        """The answer, where the last one had the same text: all but the tensors behind it."""
        last = self._last
        if last is None or last.wanted is not wanted or last.version != result.version:
            return None
        outputs = result.outputs
        if result.parameters or _layout(outputs) != last.layout:
            return None
        return last.headers, last.lines, [last.text, *map(encode_raw, outputs.values())]

    def _remember(
        self, result: InferResult, wanted: Wanted, headers: Headers, body: list[Raw]
    ) -> _Packed:
        lines, outputs = lines_of(headers), result.outputs
        plain = wanted.binary if not wanted.outputs else all(map(_is_plain, wanted.outputs))
        # Strings differ in size under one shape.
        plain = plain and not result.parameters
        if plain and all(array.dtype != object for array in outputs.values()):
            self._last = _Last(
                wanted, result.version, _layout(outputs), headers, lines, bytes(body[0])
            )
        return headers, lines, body

    def _fail(self, cycle: Any, connection: Any, error: Exception) -> None:
        status, headers, body = failure(error)
        _answer(connection, cycle, status, headers, lines_of(headers), body)


def _is_plain(output: Output) -> bool:
    """Whether the output is a tensor behind the text."""
    return output.binary and not output.classes and output.span is None


def _layout(outputs: Mapping[str, np.ndarray]) -> list[Any]:
    return [(name, array.dtype, array.shape) for name, array in outputs.items()]


def _answer(
    connection: Any, cycle: Any, status: int, headers: Headers, lines: bytes, body: list[Raw]
) -> None:
    if not connection.answer(cycle, status, lines, body):
        connection.start(send_whole(cycle.send, status, headers, body))
