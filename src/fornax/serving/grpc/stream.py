"""ModelStreamInfer: many requests in flight, answered in their order; models that stream send each
piece as it is made, interleaved with other requests.

A request that fails has its error in its own answer, and the stream continues. What waits for a
slow reader is bounded: beyond it no more requests are read, and the client's sending stops.
"""

import asyncio
from collections import deque

import grpc
from grpc.aio import EOF  # pyrefly: ignore[missing-module-attribute]

from fornax.serving.access import Limits
from fornax.serving.grpc import inference_pb2 as pb
from fornax.serving.grpc.codec import encode
from fornax.serving.grpc.inference import Inference, Submitted
from fornax.serving.grpc.methods import Context, abort
from fornax.serving.grpc.open_stream import IN_FLIGHT, OpenStream, OpenStreams
from fornax.serving.types import InferResult, as_serving_error
from fornax.serving.v2.datatypes import raw_size

__all__ = ["FINAL", "Streams"]

_WAITING_BYTES = 64 * 2**20
"""Bytes of answers that wait for their turn; while there are more, no request is read."""
FINAL = "triton_final_response"
_Ready = tuple[Submitted, InferResult | None]
"""A request, and a piece of its answer; None: its answer, or the last piece."""


class Streams:
    """The streams that are open."""

    def __init__(self, inference: Inference, limits: Limits):
        self._inference = inference
        self._open = OpenStreams(limits.send_timeout)

    def handler(self) -> grpc.RpcMethodHandler:
        """The handler of ModelStreamInfer."""
        return grpc.stream_stream_rpc_method_handler(self._serve)

    def close(self) -> None:
        """Read no more requests; what was read is answered, then each stream ends."""
        self._open.close()

    async def _serve(self, _: object, context: Context) -> None:
        try:
            with self._open.opened(context) as client:
                await _Stream(self._inference, client).run()
        except Exception as error:
            await abort(context, as_serving_error(error, "ModelStreamInfer"))


class _Stream:
    def __init__(self, inference: Inference, client: OpenStream):
        self._inference = inference
        self._client = client
        self._ordered: deque[Submitted] = deque()
        """Requests that are answered whole, in their order."""
        self._ready: asyncio.Queue[_Ready | None] = asyncio.Queue()
        """What can be sent; None: no more requests come."""
        self._moved = asyncio.Event()
        self._open: set[asyncio.Future[InferResult]] = set()
        """Of requests whose last answer is not sent."""
        self._waiting_bytes = 0

    async def run(self) -> None:
        """Serve until the client has sent its last request and read its last answer."""
        try:
            async with self._client.reading(self._read(), lambda: self._ready.put_nowait(None)):
                while self._open or self._client.is_read:
                    if (ready := await self._ready.get()) is not None:
                        await self._answer(*ready)
        finally:
            for future in self._open:  # nobody will read them
                future.cancel()

    async def _read(self) -> None:
        """Hand requests to the host as they come."""
        context = self._client.context
        while (data := await context.read()) is not EOF:
            submitted = self._inference.submit(data, context, self._piece)
            self._open.add(submitted.future)
            if not submitted.in_pieces:
                self._ordered.append(submitted)
            if submitted.future.done():
                self._finished(submitted)
            else:
                submitted.future.add_done_callback(lambda _, each=submitted: self._finished(each))
            while len(self._open) >= IN_FLIGHT or self._waiting_bytes > _WAITING_BYTES:
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
                sent.future.cancel()  # useful where it was a piece that could not be sent
                last = True
            answer.parameters[FINAL].bool_param = last
            if last:
                self._open.discard(sent.future)
            await self._client.write(response.SerializeToString())
        self._waiting_bytes -= _size(sent.future) if piece is None else _bytes(piece)
        self._moved.set()


def _size(future: "asyncio.Future[InferResult]") -> int:
    """The bytes of a future's arrays; 0 where it has none."""
    if future.cancelled() or future.exception() is not None:
        return 0
    return _bytes(future.result())


def _bytes(result: InferResult) -> int:
    return sum(map(raw_size, result.outputs.values()))
