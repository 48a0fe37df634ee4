"""ModelStreamInfer: many requests in flight, answered in their order; models that stream send each
piece as it is made, interleaved with other requests.

A request that fails has its error in its own answer, and the stream goes on. What waits for a slow
reader is bounded: beyond it no more requests are read, and the client's sending stops.
"""

import asyncio
import contextlib
from collections import deque

import grpc
from grpc.aio import EOF  # pyrefly: ignore[missing-module-attribute]

from fornax.config.errors import ServingCode, ServingError
from fornax.serving.access import Limits
from fornax.serving.grpc import inference_pb2 as pb
from fornax.serving.grpc.codec import encode
from fornax.serving.grpc.inference import Inference, Submitted
from fornax.serving.grpc.methods import Context, abort
from fornax.serving.types import InferResult, as_serving_error
from fornax.serving.v2.datatypes import raw_size

__all__ = ["FINAL", "Streams"]

_IN_FLIGHT = 256
"""Requests of one stream that are read and not answered, at most."""
_WAITING_BYTES = 64 * 2**20
"""Bytes of answers that wait for their turn; while there are more, no request is read."""
FINAL = "triton_final_response"
_Ready = tuple[Submitted, InferResult | None]
"""A request, and a piece of its answer; None: its answer, or the last piece."""


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

    async def _serve(self, _: object, context: Context) -> None:
        stream = _Stream(self._inference, context, self._limits.send_timeout)
        self._open.add(stream)
        try:
            if self._closing:
                stream.close()
            await stream.run()
        except Exception as error:
            await abort(context, as_serving_error(error, "ModelStreamInfer"))
        finally:
            self._open.discard(stream)


class _Stream:
    def __init__(self, inference: Inference, context: Context, send_timeout: float):
        self._inference = inference
        self._context = context
        self._send_timeout = send_timeout
        self._ordered: deque[Submitted] = deque()
        """Requests that are answered whole, in their order."""
        self._ready: asyncio.Queue[_Ready | None] = asyncio.Queue()
        """What can be sent; None: no more requests come."""
        self._moved = asyncio.Event()
        self._open: set[asyncio.Future[InferResult]] = set()
        """Of requests whose last answer is not sent."""
        self._waiting_bytes = 0
        self._reader: asyncio.Task[None] | None = None
        self._closed = False

    def close(self) -> None:
        """Read no more."""
        self._closed = True
        if self._reader is not None:
            self._reader.cancel()

    async def run(self) -> None:
        """Serve until the client has sent its last request and read its last answer."""
        reader = self._reader = asyncio.create_task(self._read())
        reader.add_done_callback(lambda _: self._ready.put_nowait(None))
        if self._closed:
            reader.cancel()
        try:
            while self._open or not reader.done():
                if (ready := await self._ready.get()) is not None:
                    await self._answer(*ready)
            with contextlib.suppress(asyncio.CancelledError):
                await reader
        finally:
            reader.cancel()
            for future in self._open:  # nobody will read them
                future.cancel()
        if self._closed:
            raise ServingError(
                ServingCode.UNAVAILABLE,
                "the server is stopping; what was sent on this stream is answered, send the rest "
                "to another server",
            )

    async def _read(self) -> None:
        """Hand requests to the host as they come."""
        while (data := await self._context.read()) is not EOF:
            submitted = self._inference.submit(data, self._context, self._piece)
            self._open.add(submitted.future)
            if not submitted.in_pieces:
                self._ordered.append(submitted)
            if submitted.future.done():
                self._finished(submitted)
            else:
                submitted.future.add_done_callback(lambda _, each=submitted: self._finished(each))
            while len(self._open) >= _IN_FLIGHT or self._waiting_bytes > _WAITING_BYTES:
                self._moved.clear()
                await self._moved.wait()

    def _piece(self, sent: Submitted, piece: InferResult) -> None:
        self._waiting_bytes += _bytes(piece)
        self._ready.put_nowait((sent, piece))

    def _finished(self, sent: Submitted) -> None:
        """Queue every answer that is next in order."""
        self._waiting_bytes += _size(sent.future)
        if sent.in_pieces:
            self._ready.put_nowait((sent, None))
            return
        while self._ordered and self._ordered[0].future.done():
            self._ready.put_nowait((self._ordered.popleft(), None))

    async def _answer(self, sent: Submitted, piece: InferResult | None) -> None:
        """Send what became of a request, or a piece of it."""
        if sent.future in self._open:
            response = pb.ModelStreamInferResponse()
            answer, last = response.infer_response, piece is None
            try:
                encode(
                    await sent.result() if piece is None else piece, sent.options_by_output, answer
                )
            except Exception as error:
                response.error_message = str(as_serving_error(error, "ModelStreamInfer"))
                answer.Clear()
                answer.model_name, answer.id = sent.model, sent.id
                sent.future.cancel()  # of use where it was a piece that could not be sent
                last = True
            answer.parameters[FINAL].bool_param = last
            if last:
                self._open.discard(sent.future)
            await self._write(response.SerializeToString())
        self._waiting_bytes -= _size(sent.future) if piece is None else _bytes(piece)
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


def _size(future: "asyncio.Future[InferResult]") -> int:
    """The bytes of a future's arrays; 0 where it has none."""
    if future.cancelled() or future.exception() is not None:
        return 0
    return _bytes(future.result())


def _bytes(result: InferResult) -> int:
    return sum(map(raw_size, result.outputs.values()))
