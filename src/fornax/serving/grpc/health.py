"""The standard health service: of the server, of the inference service, and of each model.

A service's name is empty (the server), `inference.GRPCInferenceService`, a model's name, or
NAME/VERSION. Readiness is asked of the host at each call; a watch is told of changes.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import grpc

from fornax.config.errors import FornaxError, ServingCode, ServingError
from fornax.serving.failures import as_serving_error
from fornax.serving.grpc.calls import fail, parse
from fornax.serving.grpc.messages import SERVICE
from fornax.serving.grpc.standard import HEALTH, health_message

__all__ = ["NAME", "Health"]

NAME = HEALTH
_Request = health_message("HealthCheckRequest")
_Status = health_message("HealthCheckResponse")
_ListRequest = health_message("HealthListRequest")
_ListResponse = health_message("HealthListResponse")
_WHOLE = ("", SERVICE)
_LOOK_SECONDS = 1.0
"""Between looks of a watch, as not everything that ends readiness is told."""
_MOST_WATCHES = 256
"""They need no token, and each takes a place among the calls."""


class Health:
    """Answers for a Host."""

    def __init__(self, host: Any):
        self._host = host
        self._changed: set[asyncio.Event] = set()
        self._closing = False
        host.events.states.append(self._tell)

    def close(self) -> None:
        """Not serving any more; watches are told so and end."""
        self._closing = True
        self._tell(None)

    def detach(self) -> None:
        """Listen to the host no more."""
        self._host.events.states.remove(self._tell)

    def handlers(self) -> dict[str, grpc.RpcMethodHandler]:
        """The handlers by the service's methods."""
        return {
            "Check": grpc.unary_unary_rpc_method_handler(self._check),
            "Watch": grpc.unary_stream_rpc_method_handler(self._watch),
            "List": grpc.unary_unary_rpc_method_handler(self._list),
        }

    def _tell(self, _: object) -> None:
        for event in self._changed:
            event.set()

    def status(self, service: str) -> int | None:
        """A value of HealthCheckResponse.ServingStatus; None: there is no such service."""
        if service in _WHOLE:
            ready = self._host.ready()
        else:
            name, _, version = service.partition("/")
            known = {(each.name, each.version) for each in self._host.index()}
            try:
                ready = self._host.model_ready(name, version)
            except FornaxError:
                ready = False
            if not ready and not any(
                name == each and version in ("", number) for each, number in known
            ):
                return None
        return _Status.SERVING if ready and not self._closing else _Status.NOT_SERVING

    async def _check(self, data: bytes, context: Any) -> bytes:
        try:
            service = parse(_Request, data).service
            status = self.status(service)
            if status is None:
                raise ServingError(
                    ServingCode.NOT_FOUND,
                    f"{service[:80]!r} is neither a model of this server, nor one of its services",
                )
            return _Status(status=status).SerializeToString()
        except Exception as error:
            await fail(context, as_serving_error(error, "Check"))

    async def _list(self, data: bytes, context: Any) -> bytes:
        try:
            parse(_ListRequest, data)
            names = sorted({each.name for each in self._host.index()})
            response = _ListResponse()
            for name in (*_WHOLE, *names):
                status = self.status(name)
                if status is not None:
                    response.statuses[name].status = status
            return response.SerializeToString()
        except Exception as error:
            await fail(context, as_serving_error(error, "List"))

    async def _watch(self, data: bytes, context: Any) -> None:
        changed = asyncio.Event()
        self._changed.add(changed)
        try:
            if len(self._changed) > _MOST_WATCHES:
                raise ServingError(
                    ServingCode.RESOURCE_EXHAUSTED,
                    f"{_MOST_WATCHES} calls watch already, the most that this server takes; ask by "
                    "Check",
                )
            service = parse(_Request, data).service
            await self._report(service, changed, context.write)
        except Exception as error:
            await fail(context, as_serving_error(error, "Watch"))
        finally:
            self._changed.discard(changed)

    async def _report(
        self, service: str, changed: asyncio.Event, write: Callable[[bytes], Any]
    ) -> None:
        """Send the status whenever it is another, until the server closes."""
        last = -1
        while True:
            changed.clear()
            status = self.status(service)
            status = _Status.SERVICE_UNKNOWN if status is None else status
            if status != last:
                await write(_Status(status=status).SerializeToString())
                last = status
            if self._closing:
                return
            try:
                async with asyncio.timeout(_LOOK_SECONDS):
                    await changed.wait()
            except TimeoutError:
                continue
