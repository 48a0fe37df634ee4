"""A router's gRPC: hands each call of the V2 service to a replica, and its answer back, as bytes.

A call whose replica dies is made again at another one. Streams are in `grpc_stream`. Liveness,
readiness, health of the whole server and reflection are the router's own.
"""

import contextlib
import functools
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc
import grpc.aio

from fornax.cluster.routing.changes import Changes
from fornax.cluster.routing.grpc_health import RoutedHealth
from fornax.cluster.routing.grpc_stream import StreamProxy
from fornax.cluster.routing.metrics import RouterMetrics
from fornax.cluster.routing.pool import Replica, ReplicaPool
from fornax.cluster.routing.tracing import RequestTrace, begin_trace
from fornax.cluster.routing.upstreams import (
    REPLICA,
    Upstreams,
    is_broken,
    is_refusal,
    say_who,
)
from fornax.config.credentials import Credentials
from fornax.config.errors import ServingCode, ServingError
from fornax.config.request_id import HEADER
from fornax.config.tracing import Spans
from fornax.serving.config import Address
from fornax.serving.grpc import inference_pb2 as pb
from fornax.serving.grpc.front import Front, Listening
from fornax.serving.grpc.methods import ADMIN, METHODS, Context, abort, identify
from fornax.serving.grpc.send_timeout import SendTimeout

__all__ = ["GrpcProxy"]

_CHANGES = ADMIN - {"SystemSharedMemoryStatus"}

_TRACED = frozenset(("ModelInfer", "ModelStreamInfer"))

_Answer = Callable[[bytes, Context, RequestTrace | None], Awaitable[bytes]]


class GrpcProxy:
    """Serves a pool's replicas over gRPC, on the loop that `start` is called in."""

    def __init__(
        self,
        front: Front,
        pool: ReplicaPool,
        changes: Changes,
        metrics: RouterMetrics,
        credentials: Credentials,
        spans: Spans | None = None,
    ):
        """`credentials`: see `client_session`."""
        self._front = front
        self._spans = spans
        self._pool = pool
        self._changes = changes
        self._metrics = metrics
        self._upstreams = Upstreams(pool, metrics, credentials)
        self._streams = StreamProxy(self._upstreams, front.limits.send_timeout)
        self._send_timeout = SendTimeout(front.limits.send_timeout)
        self._health = RoutedHealth(pool, self.ask)
        self._listening: Listening | None = None
        self._stopping = False

    @property
    def secure(self) -> bool:
        """Whether it speaks TLS."""
        return self._front.tls is not None

    async def start(self) -> Address:
        """Listen; where.

        Raises:
          OSError: the address cannot be bound.
          ConfigError: the certificate or its key cannot be read.
        """
        handlers = self._handlers()
        self._listening = await self._front.listen(handlers, self._health, lambda error: None)
        return self._listening.address

    async def stop(self, drain_seconds: float = 0.0) -> None:
        """Take no new calls, answer those that run for at most `drain_seconds`, close."""
        if self._listening is None:
            return
        self._stopping = True
        self._streams.close()
        self._health.close()
        await self._listening.stop(drain_seconds)
        self._listening = None
        self._send_timeout.close()
        await self._upstreams.close()

    def _handlers(self) -> dict[str, grpc.RpcMethodHandler]:
        own: dict[str, _Answer] = {"ServerLive": self._live, "ServerReady": self._ready}
        handlers = {
            name: self._unary(
                name,
                own.get(name)
                or functools.partial(self._to_all if name in _CHANGES else self.ask, method.path),
            )
            for name, method in METHODS.items()
        }
        handlers["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(self._stream)
        return handlers

    def _unary(self, name: str, answer: _Answer) -> grpc.RpcMethodHandler:
        async def handle(data: bytes, context: Context) -> bytes:
            async with self._counted(name, context) as trace:
                if self._stopping:
                    raise ServingError(
                        ServingCode.UNAVAILABLE,
                        "the server is stopping; send the request to another",
                    )
                response = await answer(data, context, trace)
                self._send_timeout.watch(context)
                return response

        return grpc.unary_unary_rpc_method_handler(handle)

    async def _stream(self, _: object, context: Context) -> None:
        async with self._counted("ModelStreamInfer", context) as trace:
            await self._streams.serve(context, trace)

    @contextlib.asynccontextmanager
    async def _counted(self, name: str, context: Context) -> AsyncIterator[RequestTrace | None]:
        """Count a call by its end, in a span where it is traced, and end it as a replica or the
        router says."""
        request_id, trace = identify(context), None
        if self._spans is not None and name in _TRACED:
            trace = begin_trace(self._spans, context.invocation_metadata() or ())
        began, code = time.perf_counter(), "CANCELLED"
        failure: ServingError | grpc.aio.AioRpcError | None = None
        try:
            yield trace
            code = "OK"
        except ServingError as error:
            failure, code = error, _NAMES[error.code.grpc]
        except grpc.aio.AioRpcError as error:
            failure, code = error, error.code().name
        finally:
            ours = tuple(context.trailing_metadata() or ())
            who = dict(ours).get(REPLICA)
            replica, seconds = None if who is None else int(who), time.perf_counter() - began
            self._metrics.request(replica, code, seconds)
            if trace is not None:
                said = {"rpc.system": "grpc", "rpc.method": name, "rpc.grpc.status": code}
                why = code if failure is None else _details(failure)
                trace.end(request_id, replica, said, "" if code == "OK" else why)
        if isinstance(failure, ServingError):
            await abort(context, failure)
        elif failure is not None:
            theirs = failure.trailing_metadata() or ()
            trailing = (*(each for each in theirs if each[0] != HEADER), *ours)
            await context.abort(failure.code(), failure.details() or "", trailing)

    async def _live(self, data: bytes, context: Context, _: RequestTrace | None) -> bytes:
        return pb.ServerLiveResponse(live=True).SerializeToString()

    async def _ready(self, data: bytes, context: Context, _: RequestTrace | None) -> bytes:
        return pb.ServerReadyResponse(ready=bool(self._pool.ready())).SerializeToString()

    async def ask(
        self, path: str, data: bytes, context: Context, trace: RequestTrace | None = None
    ) -> bytes:
        """Have one replica answer; another one where it dies or refuses.

        Raises:
          AioRpcError: what the last one answered instead.
          ServingError: none is ready, or too many died.
        """
        tried: list[Replica] = []
        breaks, refusal = 0, None
        metadata = self._upstreams.metadata(context, trace)
        while True:
            found = await self._upstreams.choose(context, tried)
            if found is None:
                assert refusal is not None, "only who refused counts as tried"
                raise refusal
            replica, channel = found
            say_who(context, replica)
            try:
                with replica.answering():
                    call = channel.unary_unary(path)
                    return await call(data, metadata=metadata, timeout=context.time_remaining())
            except grpc.aio.AioRpcError as error:
                if is_broken(error):
                    breaks += 1
                    self._upstreams.broke(replica, breaks, error.details() or "")
                elif is_refusal(error):
                    tried.append(replica)
                    refusal = error
                    self._metrics.retry("refused")
                else:
                    raise

    async def _to_all(
        self, path: str, data: bytes, context: Context, _: RequestTrace | None
    ) -> bytes:
        """Have every replica make a change; the first failure is the answer."""
        metadata = self._upstreams.metadata(context)

        async def change(replica: Replica) -> bytes | grpc.aio.AioRpcError:
            try:
                channel = await self._upstreams.channel(replica)
                return await channel.unary_unary(path)(data, metadata=metadata)
            except grpc.aio.AioRpcError as error:
                return error

        made = await self._changes.make((path, data), change, _is_error)
        if made is None:
            raise ServingError(ServingCode.UNAVAILABLE, "no replica is ready; try again later")
        replica, answer = made
        say_who(context, replica)
        if isinstance(answer, grpc.aio.AioRpcError):
            raise answer
        return answer


_NAMES = {status.value[0]: status.name for status in grpc.StatusCode}


def _details(failure: ServingError | grpc.aio.AioRpcError) -> str:
    if isinstance(failure, ServingError):
        return str(failure)
    return failure.details() or failure.code().name


def _is_error(answer: object) -> bool:
    return isinstance(answer, grpc.aio.AioRpcError)
