"""A stream of requests: many in flight, one answer each, in the requests' order.

A request that fails has its error in its own answer, and the stream goes on. What waits for a slow
reader is bounded: beyond it no more requests are read, and the client's sending stops.
"""

import asyncio
import contextlib
from typing import Any

import grpc
from grpc.aio import EOF  # pyrefly: ignore[missing-module-attribute]

from fornax.config.errors import ServingCode, ServingError
from fornax.serving.access import Limits
from fornax.serving.failures import as_serving_error
from fornax.serving.grpc.calls import fail
from fornax.serving.grpc.codec import encode
from fornax.serving.grpc.inference import Inference, Submitted
from fornax.serving.grpc.messages import METHODS
from fornax.serving.types import InferResult
from fornax.serving.v2.datatypes import raw_size

__all__ = ["Streams"]

_Response = METHODS["ModelStreamInfer"].response
_IN_FLIGHT = 256
"""Requests of one stream that are read and not answered, at most."""
_WAITING_BYTES = 64 * 2**20
"""Bytes of answers that wait for their turn; while there are more, no request is read."""
_FINAL = "triton_final_response"


class Streams:
    """The streams that are open."""

    def __init__(self, inference: Inference, limits: Limits):
        self._inference = inference
        self._limits = limits
        self._open: set[_Stream] = set()
        self._closing = False

    def handler(self) -> grpc.RpcMethodHandler:
        """The handler of ModelStreamInfer."""
        return grpc.stream_stream_rpc_method_handler(self._serve)

    def close(self) -> None:
        """Read no more requests; what was read is answered, then each stream ends."""
        self._closing = True
        for stream in self._open:
            stream.close()

    async def _serve(self, _: Any, context: Any) -> None:
        stream = _Stream(self._inference, context, self._limits.send_timeout)
        self._open.add(stream)
        try:
            if self._closing:
                stream.close()
            await stream.run()
        except Exception as error:
            await fail(context, as_serving_error(error, "ModelStreamInfer"))
        finally:
            self._open.discard(stream)


class _Stream:
    def __init__(self, inference: Inference, context: Any, send_timeout: float):
        self._inference = inference
        self._context = context
        self._send_timeout = send_timeout
        self._sent: asyncio.Queue[Submitted | None] = asyncio.Queue()
        self._moved = asyncio.Event()
        self._unanswered = 0
        self._waiting_bytes = 0
        self._reader: asyncio.Task[None] | None = None
        self._closed = False

    def close(self) -> None:
        """Read no more."""
        self._closed = True
        if self._reader is not None:
            self._reader.cancel()

    async def run(self) -> None:
        """Until the client has sent its last request and read its last answer."""
        reader = self._reader = asyncio.create_task(self._read())
        if self._closed:
            reader.cancel()
        try:
            while (sent := await self._sent.get()) is not None:
                await self._answer(sent)
            with contextlib.suppress(asyncio.CancelledError):
                await reader
        finally:
            reader.cancel()
            self._drop()
        if self._closed:
            raise ServingError(
                ServingCode.UNAVAILABLE,
                "the server is stopping; what was sent on this stream is answered, send the rest "
                "to another server",
            )

    async def _read(self) -> None:
        """Hand requests to the host as they come."""
        try:
            while (data := await self._context.read()) is not EOF:
                submitted = self._inference.submit(data, self._context)
                self._unanswered += 1
                submitted.future.add_done_callback(self._finished)
                self._sent.put_nowait(submitted)
                while self._unanswered >= _IN_FLIGHT or self._waiting_bytes > _WAITING_BYTES:
                    self._moved.clear()
                    await self._moved.wait()
        finally:
            self._sent.put_nowait(None)

    def _finished(self, future: "asyncio.Future[InferResult]") -> None:
        self._waiting_bytes += _size(future)

    async def _answer(self, sent: Submitted) -> None:
        """Wait for one request's outcome, and send it."""
        response = _Response()
        answer = response.infer_response
        try:
            encode(await sent.result(), sent.deliveries, answer)
        except Exception as error:
            response.error_message = str(as_serving_error(error, "ModelStreamInfer"))
            answer.Clear()
            answer.model_name, answer.id = sent.model, sent.id
        answer.parameters[_FINAL].bool_param = True
        await self._write(response.SerializeToString())
        self._unanswered -= 1
        self._waiting_bytes -= _size(sent.future)
        self._moved.set()

    async def _write(self, data: bytes) -> None:
        try:
            async with asyncio.timeout(self._send_timeout):
                await self._context.write(data)
        except TimeoutError:
            raise ServingError(
                ServingCode.DEADLINE_EXCEEDED,
                f"an answer waited {self._send_timeout:g} s to be read; read answers as they come",
            ) from None

    def _drop(self) -> None:
        """Cancel what nobody will read."""
        while not self._sent.empty():
            if (sent := self._sent.get_nowait()) is not None:
                sent.future.cancel()


def _size(future: "asyncio.Future[InferResult]") -> int:
    """The bytes of a future's arrays; 0 where it has none."""
    if future.cancelled() or future.exception() is not None:
        return 0
    return sum(map(raw_size, future.result().outputs.values()))
