"""The calls that infer: one request in, its answer out, whole or in pieces."""

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import grpc

from fornax.config.errors import ServingCode, ServingError
from fornax.serving.access import Limits
from fornax.serving.entry import stream_of
from fornax.serving.failures import as_serving_error
from fornax.serving.grpc.calls import fail, parse
from fornax.serving.grpc.codec import Delivery, decode, encode
from fornax.serving.grpc.messages import METHODS
from fornax.serving.grpc.sending import Sending
from fornax.serving.types import InferRequest, InferResult
from fornax.serving.v2.shared_memory import SharedMemory

__all__ = ["Inference", "Submitted"]

_INFER = METHODS["ModelInfer"]
_EARLY = 0.005
"""Seconds by which a timer may come before its time: loops count in milliseconds."""


class Submitted(NamedTuple):
    """A request on its way."""

    future: "asyncio.Future[InferResult]"
    deliveries: Mapping[str, Delivery]
    model: str
    id: str
    deadline: float | None = None
    """By `time.monotonic()`."""
    in_pieces: bool = False
    """Whether pieces may come before the answer."""

    async def result(self) -> InferResult:
        """The answer; ServingError where there is none, or not in time."""
        try:
            return await self.future
        except asyncio.CancelledError:
            if not self.future.cancelled() or _leaving():
                raise
            if self.deadline is not None and time.monotonic() >= self.deadline - _EARLY:
                raise ServingError(
                    ServingCode.DEADLINE_EXCEEDED,
                    "the time that the request had is over; give it a longer timeout",
                ) from None
            # The host dropped it: it stops, and the time to drain was over.
            raise ServingError(
                ServingCode.UNAVAILABLE, "the server stopped before it answered; send this again"
            ) from None


class Inference:
    """Takes inference messages to the host, and its answers back."""

    def __init__(self, host: Any, limits: Limits, memory: SharedMemory):
        self._host = host
        self._limits = limits
        self._memory = memory
        self._sending = Sending(limits.send_timeout)
        self.stopping = False
        """Whether requests are sent elsewhere."""
        self.running = 0
        """Requests being answered."""

    def handler(self) -> grpc.RpcMethodHandler:
        """The handler of ModelInfer."""
        return grpc.unary_unary_rpc_method_handler(self._infer)

    async def _infer(self, data: bytes, context: Any) -> bytes:
        try:
            submitted = self.submit(data, context)
            try:
                result = await submitted.result()
            finally:
                submitted.future.cancel()  # of use where the client is gone
            response = encode(result, submitted.deliveries, _INFER.response())
            self._sending.began(context)
            return response.SerializeToString()
        except Exception as error:
            await fail(context, as_serving_error(error, "ModelInfer"))

    def close(self) -> None:
        """Watch over answers no more."""
        self._sending.close()

    def submit(
        self,
        data: bytes,
        context: Any,
        take: Callable[[Submitted, InferResult], None] | None = None,
    ) -> Submitted:
        """Hand the request in `data` to the host; where it is refused, the future says so.

        `take` gets the pieces before the last of models that answer in pieces; None: all of them
        answer whole.
        """
        received = time.monotonic()
        message = None
        try:
            message = self._parse(data)
            request, deliveries = decode(message, received, self._memory, self._limits)
        except Exception as failure:
            error = as_serving_error(failure, _INFER.name)
            model, name = (message.model_name, message.id) if message is not None else ("", "")
            self._host.events.tell_refused("grpc", error.code, str(error), model, name)
            return Submitted(_failed(error), {}, model, name)
        _from_context(request, context, self._limits.request_timeout)
        in_pieces = (
            take is not None and stream_of(self._host.entries.get(request.model)) is not None
        )
        if take is not None and in_pieces:
            request.pieces = lambda piece: take(submitted, piece)  # none comes before this returns
        try:
            future = self._host.submit(request)
        except Exception as failure:
            error = as_serving_error(failure, _INFER.name)
            return Submitted(_failed(error), {}, message.model_name, request.id)
        self.running += 1
        future.add_done_callback(self._done)
        if request.deadline is not None:
            left = max(request.deadline - time.monotonic(), 0.0)
            timer = asyncio.get_running_loop().call_later(left, future.cancel)
            future.add_done_callback(lambda _: timer.cancel())
        submitted = Submitted(
            future, deliveries, message.model_name, request.id, request.deadline, in_pieces
        )
        return submitted

    def _parse(self, data: bytes) -> Any:
        """The request's message, if there is room for one more."""
        if self.stopping:
            raise ServingError(
                ServingCode.UNAVAILABLE, "the server is stopping; send the request to another"
            )
        if self.running >= self._limits.max_concurrent_requests:
            raise ServingError(
                ServingCode.RESOURCE_EXHAUSTED,
                f"{self.running} requests are being answered, the most that this server takes; "
                "try again later",
            )
        return parse(_INFER.request, data)

    def _done(self, future: "asyncio.Future[InferResult]") -> None:
        self.running -= 1
        if not future.cancelled():
            future.exception()  # looked at here, as the client may be gone


def _leaving() -> bool:
    """Whether it is the call itself that was cancelled: its client is gone."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _failed(error: ServingError) -> "asyncio.Future[InferResult]":
    future: asyncio.Future[InferResult] = asyncio.get_running_loop().create_future()
    future.set_exception(error)
    future.exception()
    return future


def _from_context(request: InferRequest, context: Any, longest: float) -> None:
    """What the call says of its request: when it must be done, its id, its trace."""
    received = request.received
    for seconds in (context.time_remaining(), longest or None):
        if seconds is not None and (
            request.deadline is None or received + seconds < request.deadline
        ):
            request.deadline = received + seconds
    for key, value in context.invocation_metadata():
        if key == "traceparent":
            request.trace = value
        elif key == "x-request-id" and not request.id:
            request.id = value
