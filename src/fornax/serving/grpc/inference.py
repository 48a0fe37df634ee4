"""The calls that infer: one request in, its answer out, whole or in pieces."""

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import grpc

from fornax.config.errors import ServingCode, ServingError
from fornax.config.request_id import HEADER
from fornax.serving.access import Limits
from fornax.serving.backend import stream_of
from fornax.serving.grpc import inference_pb2 as pb
from fornax.serving.grpc.codec import decode, encode
from fornax.serving.grpc.methods import Context, abort, identify, parse
from fornax.serving.grpc.send_timeout import SendTimeout
from fornax.serving.types import InferRequest, InferResult, as_serving_error
from fornax.serving.v2.parameters import OutputOptions
from fornax.serving.v2.shared_memory import SharedMemory

if TYPE_CHECKING:
    from fornax.serving.host import Host

__all__ = ["Inference", "Submitted"]

_EARLY = 0.005
"""Seconds by which a timer may come before its time: loops count in milliseconds."""


class Submitted(NamedTuple):
    """A request that the host was asked."""

    future: "asyncio.Future[InferResult]"
    options_by_output: Mapping[str, OutputOptions]
    model: str
    id: str
    deadline: float | None = None
    """By `time.monotonic()`."""
    in_pieces: bool = False
    """Whether the model may stream pieces before the final answer."""

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
    """Decodes requests, submits them to the host and encodes the results."""

    def __init__(self, host: "Host", limits: Limits, memory: SharedMemory):
        self._host = host
        self._limits = limits
        self._memory = memory
        self._send_timeout = SendTimeout(limits.send_timeout)
        self.stopping = False
        """Refuse new requests with UNAVAILABLE."""
        self.running = 0
        """Requests being answered."""

    def handler(self) -> grpc.RpcMethodHandler:
        """The handler of ModelInfer."""
        return grpc.unary_unary_rpc_method_handler(self._infer)

    async def _infer(self, data: bytes, context: Context) -> bytes:
        try:
            submitted = self.submit(data, context)
            try:
                result = await submitted.result()
            finally:
                submitted.future.cancel()  # useful where the client is gone
            response = encode(result, submitted.options_by_output)
            self._send_timeout.watch(context)
            return response.SerializeToString()
        except Exception as error:
            await abort(context, as_serving_error(error, "ModelInfer"))

    def close(self) -> None:
        """Stop the checks of the send timeout."""
        self._send_timeout.close()

    def submit(
        self,
        data: bytes,
        context: Context,
        take: Callable[[Submitted, InferResult], None] | None = None,
    ) -> Submitted:
        """Hand the request in `data` to the host; where it is refused, the future says so.

        `take` gets the pieces before the last of models that answer in pieces; None: all of them
        answer whole.
        """
        received = time.monotonic()
        message, request_id = None, identify(context)
        try:
            message = self._parse(data)
            request, options_by_output = decode(message, received, self._memory, self._limits)
        except Exception as failure:
            error = as_serving_error(failure, "ModelInfer")
            model, name = (message.model_name, message.id) if message is not None else ("", "")
            self._host.events.tell_refused("grpc", error.code, str(error), model, name, request_id)
            return Submitted(_failed(error), {}, model, name)
        request.request_id = request_id
        _from_context(request, context)
        in_pieces = (
            take is not None and stream_of(self._host.backends.get(request.model)) is not None
        )
        if take is not None and in_pieces:
            request.pieces = lambda piece: take(submitted, piece)  # none comes before this returns
        try:
            future = self._host.submit(request)
        except Exception as failure:
            error = as_serving_error(failure, "ModelInfer")
            return Submitted(_failed(error), {}, message.model_name, request.id)
        self.running += 1
        future.add_done_callback(self._done)
        if request.deadline is not None:
            left = max(request.deadline - time.monotonic(), 0.0)
            timer = asyncio.get_running_loop().call_later(left, future.cancel)
            future.add_done_callback(lambda _: timer.cancel())
        submitted = Submitted(
            future, options_by_output, message.model_name, request.id, request.deadline, in_pieces
        )
        return submitted

    def _parse(self, data: bytes) -> pb.ModelInferRequest:
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
        return parse(pb.ModelInferRequest, data)

    def _done(self, future: "asyncio.Future[InferResult]") -> None:
        self.running -= 1
        if not future.cancelled():
            future.exception()  # looked at here, as the client may be gone


def _leaving() -> bool:
    """Whether this task, the call, is being cancelled: its client is gone."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _failed(error: ServingError) -> "asyncio.Future[InferResult]":
    future: asyncio.Future[InferResult] = asyncio.get_running_loop().create_future()
    future.set_exception(error)
    future.exception()
    return future


def _from_context(request: InferRequest, context: Context) -> None:
    """Set the request's deadline, trace and id from the call's deadline and metadata."""
    left = context.time_remaining()
    if left is not None:
        due = request.received + left
        request.deadline = due if request.deadline is None else min(due, request.deadline)
    for key, value in context.invocation_metadata() or ():
        if key == "traceparent":
            request.trace = value
        elif key == HEADER and not request.id and value == request.request_id:
            request.id = request.request_id
