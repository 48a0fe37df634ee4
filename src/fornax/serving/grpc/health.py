"""The standard health service: of the server, of the inference service, and of each model.

A service's name is empty (the server), `inference.GRPCInferenceService`, a model's name, or
NAME/VERSION. Readiness is asked of the host at each call; a watch sends changes.
"""

import asyncio
import contextlib
from typing import TYPE_CHECKING

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fornax.config.errors import FornaxError
from fornax.serving.grpc.methods import SERVICE

if TYPE_CHECKING:
    from fornax.serving.host import Host

__all__ = ["Health"]

_Status = health_pb2.HealthCheckResponse
_Context = grpc.aio.ServicerContext[Message, Message]
_WHOLE = ("", SERVICE)
_CHECK_SECONDS = 1.0
"""Between checks of a watch: not every change of readiness is an event."""
_MOST_WATCHES = 256
"""Watches need no token, and each holds one of the concurrent calls."""


class Health(health_pb2_grpc.HealthServicer):
    """The health of a Host."""

    def __init__(self, host: "Host"):
        self._host = host
        self._changed: set[asyncio.Event] = set()
        self._closing = False
        host.events.states.append(self._state_changed)

    def close(self) -> None:
        """Report NOT_SERVING and end the watches."""
        self._closing = True
        self._state_changed(None)

    def detach(self) -> None:
        """Unsubscribe from the host's events."""
        self._host.events.states.remove(self._state_changed)

    def _state_changed(self, _: object) -> None:
        for event in self._changed:
            event.set()

    def _status(self, service: str) -> health_pb2.HealthCheckResponse | None:
        """The service's status; None where there is no such service."""
        if service in _WHOLE:
            ready = self._host.ready()
        else:
            name, _, version = service.partition("/")
            try:
                ready = self._host.model_ready(name, version)
            except FornaxError:
                ready = False
            if not ready and not any(
                name == each.name and version in ("", each.version) for each in self._host.index()
            ):
                return None
        serving = ready and not self._closing
        return _Status(status=_Status.SERVING if serving else _Status.NOT_SERVING)

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: _Context
    ) -> health_pb2.HealthCheckResponse:
        """The status of a service."""
        status = self._status(request.service)
        if status is None:
            await context.abort(
                grpc.StatusCode.NOT_FOUND,
                f"{request.service[:80]!r} is neither a model of this server, nor one of its "
                "services",
            )
        return status

    async def List(self, request: Message, context: _Context) -> Message:
        """The status of every service; called where grpcio-health-checking is 1.85 or newer."""
        names = (*_WHOLE, *sorted({each.name for each in self._host.index()}))
        found = {name: self._status(name) for name in names}
        return health_pb2.HealthListResponse(  # pyrefly: ignore[missing-attribute]
            statuses={name: status for name, status in found.items() if status is not None}
        )

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: _Context) -> None:
        """Send the status whenever it is another, until the server closes."""
        changed = asyncio.Event()
        self._changed.add(changed)
        try:
            if len(self._changed) > _MOST_WATCHES:
                await context.abort(
                    grpc.StatusCode.RESOURCE_EXHAUSTED,
                    f"{_MOST_WATCHES} calls watch already, the most that this server takes; ask by "
                    "Check",
                )
            last = None
            while True:
                changed.clear()
                status = self._status(request.service) or _Status(status=_Status.SERVICE_UNKNOWN)
                if status != last:
                    await context.write(status)
                    last = status
                if self._closing:
                    return
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_CHECK_SECONDS):
                        await changed.wait()
        finally:
            self._changed.discard(changed)
