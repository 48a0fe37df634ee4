"""A call's way in and out: who may make it, what its bytes hold, and how a failure is told."""

from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError

from fornax.config.errors import ServingCode, ServingError
from fornax.serving.access import Auth
from fornax.serving.events import Events
from fornax.serving.failures import as_serving_error
from fornax.serving.grpc.messages import Method
from fornax.serving.v2.datatypes import refuse

__all__ = ["Answer", "Table", "fail", "parse", "unary"]

_STATUS = {status.value[0]: status for status in grpc.StatusCode}
_MAX_DETAILS = 2048
"""Bytes; as header they may take three times as many, and clients take 8 KiB of headers."""

_MAX_MESSAGE = 2**20
"""Bytes of a message that is no inference."""

Answer = Callable[[Any, Any], Awaitable[Any]]
"""From a request's message and the call's context to the answer's message."""


def parse(kind: Any, data: bytes) -> Any:
    """The message of a class in `data`; ServingError for bytes that are none."""
    try:
        return kind.FromString(data)
    except DecodeError:
        raise refuse(f"{len(data)} bytes are no {kind.DESCRIPTOR.full_name}") from None


async def fail(context: Any, error: ServingError) -> NoReturn:
    """End the call with the error's status, its paragraph as the details."""
    details = str(error).encode("utf-8", "replace")[:_MAX_DETAILS].decode("utf-8", "ignore")
    await context.abort(_STATUS[error.code.grpc], details)
    raise AssertionError("abort returned")


def unary(method: Method, answer: Answer) -> grpc.RpcMethodHandler:
    """A handler of one message in, one out; failures become statuses."""

    async def handle(data: bytes, context: Any) -> bytes:
        try:
            if len(data) > _MAX_MESSAGE:
                raise ServingError(
                    ServingCode.TOO_LARGE,
                    f"the message has {len(data)} bytes; {method.name} takes {_MAX_MESSAGE}",
                )
            response = await answer(parse(method.request, data), context)
            return response.SerializeToString()
        except Exception as error:
            await fail(context, as_serving_error(error, method.name))

    return grpc.unary_unary_rpc_method_handler(handle)


class Table(grpc.GenericRpcHandler):
    """All calls of the server by their paths, and the tokens that each asks for."""

    def __init__(self, events: Events):
        self._events = events
        self._calls: dict[str, tuple[grpc.RpcMethodHandler, Auth | None]] = {}

    def add(self, path: str, handler: grpc.RpcMethodHandler, auth: Auth | None) -> None:
        """Serve `path`; with `auth`, only to those who present one of its tokens."""
        needed = auth if auth is not None and auth.enabled else None
        self._calls[path] = handler, needed

    def service(self, handler_call_details: Any) -> grpc.RpcMethodHandler | None:
        """The handler of a call; None: there is no such call."""
        handler, auth = self._calls.get(handler_call_details.method, (None, None))
        if handler is None or auth is None:
            return handler
        for key, value in handler_call_details.invocation_metadata:
            if key == "authorization":
                if auth.admits(value):
                    return handler
                return self._refused(handler, "it is none that this server knows")
        return self._refused(handler, "none was sent")

    def _refused(self, handler: grpc.RpcMethodHandler, why: str) -> grpc.RpcMethodHandler:
        error = ServingError(
            ServingCode.UNAUTHENTICATED,
            f"this call needs a token, and {why}; send metadata `authorization: Bearer TOKEN`",
        )
        self._events.tell_refused("grpc", error.code, str(error))

        async def refuse_call(_: Any, context: Any) -> None:
            await fail(context, error)

        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(refuse_call)
        return grpc.unary_unary_rpc_method_handler(refuse_call)
