"""ModelStreamInfer through a router: a client's stream as a sequence of streams to replicas.

Requests go to one replica until all that were sent are answered; the next one chooses again. So
an open stream that asks nothing holds no replica up, and the death of a replica that still has to
send it nothing is not noticed. Requests that a replica died under go to another one, unless a piece
of an answer was passed on: then the stream ends with UNAVAILABLE.
"""

import asyncio
import contextlib
import dataclasses

import grpc.aio
from google.protobuf.message import DecodeError
from grpc.aio import EOF  # pyrefly: ignore[missing-module-attribute]

from fornax.cluster.routing.pool import Replica
from fornax.cluster.routing.tracing import RequestTrace
from fornax.cluster.routing.upstreams import (
    Upstreams,
    is_broken,
    is_refusal,
    say_who,
)
from fornax.config.errors import ServingCode, ServingError
from fornax.serving.grpc import inference_pb2 as pb
from fornax.serving.grpc.methods import METHODS, Context
from fornax.serving.grpc.open_stream import IN_FLIGHT, OpenStream, OpenStreams
from fornax.serving.grpc.stream import FINAL

__all__ = ["StreamProxy"]

_HELD_BYTES = 64 * 2**20
"""Bytes of such requests; while there are more, none is read."""
_PATH = METHODS["ModelStreamInfer"].path


class StreamProxy:
    """The streams that are open."""

    def __init__(self, upstreams: Upstreams, send_timeout: float):
        self._upstreams = upstreams
        self._open = OpenStreams(send_timeout)

    async def serve(self, context: Context, trace: RequestTrace | None = None) -> None:
        """Serve a client's stream to its end; `trace` is the one that its requests belong to.

        Raises:
          ServingError: it ends early: a replica died during an answer, or the router stops.
          AioRpcError: it ends as a replica said.
        """
        with self._open.opened(context) as client:
            await _Stream(self._upstreams, client, trace).run()

    def close(self) -> None:
        """Read no more requests; what was read is answered, then each stream ends."""
        self._open.close()


@dataclasses.dataclass(eq=False)
class _Request:
    """A request that is not answered yet."""

    data: bytes
    model: str
    id: str
    begun: bool = False
    """Whether a piece of its answer was passed on."""


class _Stream:
    def __init__(self, upstreams: Upstreams, client: OpenStream, trace: RequestTrace | None):
        self._upstreams = upstreams
        self._client = client
        self._context = client.context
        self._metadata = upstreams.metadata(client.context, trace)
        self._requests: list[_Request] = []
        """Those not answered, in order."""
        self._sent = 0
        """How many of them the replica has."""
        self._held = 0
        self._breaks = 0
        """Replicas that died since the last whole answer."""
        self._changed = asyncio.Event()
        """Set when a request came or was answered, or the client's last one has come."""

    async def run(self) -> None:
        """Until the client has sent its last request and got its last answer."""
        async with self._client.reading(self._read(), self._changed.set):
            while True:
                while not self._requests and self._client.is_read:
                    await self._change()
                if not self._requests:
                    break
                await self._by_one()

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    async def _read(self) -> None:
        """Take requests as they come, as many as may wait."""
        while (data := await self._context.read()) is not EOF:
            self._requests.append(_parsed(data))
            self._held += len(data)
            self._changed.set()
            while len(self._requests) >= IN_FLIGHT or self._held > _HELD_BYTES:
                await self._change()

    async def _by_one(self) -> None:
        """Have one replica answer what there is, until all is answered or it ends."""
        found = await self._upstreams.choose(self._context)
        assert found is not None, "nothing counts as tried"
        replica, channel = found
        say_who(self._context, replica)
        with replica.answering():
            self._sent = 0
            call = channel.stream_stream(_PATH)(
                metadata=self._metadata, timeout=self._context.time_remaining()
            )
            writer = asyncio.create_task(self._write(call, replica))
            try:
                while (data := await self._read_answer(call, replica)) is not None:
                    await self._pass_on(data)
                    if not self._requests:
                        return
            finally:
                writer.cancel()
                call.cancel()

    async def _write(self, call: "grpc.aio.StreamStreamCall", replica: Replica) -> None:
        """Send requests to a replica for as long as it takes any."""
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                while self._sent < len(self._requests):
                    if self._sent and replica not in self._upstreams.pool.usable():
                        await call.done_writing()
                        return
                    request = self._requests[self._sent]
                    self._sent += 1
                    await call.write(request.data)
                await self._change()

    async def _pass_on(self, data: bytes) -> None:
        """An answer, or a piece of one, to the client."""
        answer = pb.ModelStreamInferResponse.FromString(data).infer_response
        request = self._answered(answer.model_name, answer.id)
        request.begun = True
        if FINAL not in answer.parameters or answer.parameters[FINAL].bool_param:
            self._requests.remove(request)
            self._held -= len(request.data)
            self._sent -= 1
            self._breaks = 0
            self._changed.set()
        await self._client.write(data)

    def _answered(self, model: str, name: str) -> _Request:
        """Whose answer it is: requests that look the same are answered in order."""
        sent = self._requests[: self._sent]
        for request in sent:
            if (request.model, request.id) == (model, name):
                return request
        return next((each for each in sent if each.model == model), sent[0])

    async def _read_answer(
        self, call: "grpc.aio.StreamStreamCall", replica: Replica
    ) -> bytes | None:
        """The replica's next answer; None when it ended, and its unanswered requests may go to
        another one.

        Raises:
          ServingError: a piece of an answer was passed on, or too many replicas ended.
          AioRpcError: the replica refuses what it was sent.
        """
        why = "it ended the stream"
        try:
            data = await call.read()
            if isinstance(data, bytes):
                return data
        except grpc.aio.AioRpcError as error:
            why = error.details() or error.code().name
            if not is_broken(error) and not is_refusal(error):
                raise
        owed = self._requests[: self._sent]
        if any(each.begun for each in owed):
            self._upstreams.pool.suspect(replica)
            self._upstreams.metrics.cut()
            raise ServingError(
                ServingCode.UNAVAILABLE,
                f"replica {replica.number} ended while it answered; what came is not all",
            )
        if owed:
            self._breaks += 1
            self._upstreams.broke(replica, self._breaks, why)
        return None


def _parsed(data: bytes) -> _Request:
    try:
        message = pb.ModelInferRequest.FromString(data)
    except DecodeError:  # its replica says so
        return _Request(data, "", "")
    return _Request(data, message.model_name, message.id)
