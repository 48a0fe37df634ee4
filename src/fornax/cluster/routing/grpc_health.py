"""The standard health service of a router: its own word for the server, a replica's for a model."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fornax.cluster.routing.pool import ReplicaPool
from fornax.config.errors import ServingError
from fornax.serving.grpc.methods import SERVICE, Context

__all__ = ["RoutedHealth"]

_HEALTH = "/grpc.health.v1.Health/"
_WATCH_SECONDS = 1.0
"""Between checks of a watch."""
_MOST_WATCHES = 256
"""Watches need no token, and each holds one of the concurrent calls."""
_Status = health_pb2.HealthCheckResponse
_Context = grpc.aio.ServicerContext[Any, Any]


class RoutedHealth(health_pb2_grpc.HealthServicer):
    """The health of a pool's replicas."""

    def __init__(self, pool: ReplicaPool, ask: Callable[[str, bytes, Context], Awaitable[bytes]]):
        self._pool = pool
        self._ask = ask
        self._closing = asyncio.Event()
        self._watches = 0

    def close(self) -> None:
        """Report NOT_SERVING and end the watches."""
        self._closing.set()

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: _Context
    ) -> health_pb2.HealthCheckResponse:
        """The status of a service."""
        try:
            return await self._status(request, context)
        except grpc.aio.AioRpcError as error:
            await context.abort(error.code(), error.details() or "")
        except ServingError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        raise AssertionError("abort returned")

    async def _status(
        self, request: health_pb2.HealthCheckRequest, context: _Context
    ) -> health_pb2.HealthCheckResponse:
        if request.service in ("", SERVICE):
            ready = bool(self._pool.ready()) and not self._closing.is_set()
            return _Status(status=_Status.SERVING if ready else _Status.NOT_SERVING)
        answer = await self._ask(f"{_HEALTH}Check", request.SerializeToString(), context)
        return _Status.FromString(answer)

    async def List(self, request: Message, context: _Context) -> Message:
        """The status of every service, as a replica says."""
        kind = health_pb2.HealthListResponse  # pyrefly: ignore[missing-attribute]
        answer = await self._ask(f"{_HEALTH}List", request.SerializeToString(), context)
        return kind.FromString(answer)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: _Context) -> None:
        """Send the status whenever it is another, until the router stops."""
        if self._watches >= _MOST_WATCHES:
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{_MOST_WATCHES} calls watch already, the most that this server takes; ask by "
                "Check",
            )
        self._watches += 1
        last = None
        try:
            while True:
                closing = self._closing.is_set()
                try:
                    status = await self._status(request, context)
                except (grpc.aio.AioRpcError, ServingError):
                    status = _Status(status=_Status.SERVICE_UNKNOWN)
                if status != last:
                    await context.write(status)
                    last = status
                if closing:
                    return
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_WATCH_SECONDS):
                        await self._closing.wait()
        finally:
            self._watches -= 1
