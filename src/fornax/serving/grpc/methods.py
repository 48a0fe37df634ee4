"""The calls of the V2 service: their messages, and how a failure ends them."""

from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, TypeVar

import grpc
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import DecodeError, Message

from fornax.config.errors import ServingCode, ServingError
from fornax.config.request_id import HEADER, request_id
from fornax.serving.grpc.inference_pb2 import DESCRIPTOR
from fornax.serving.types import as_serving_error
from fornax.serving.v2.datatypes import refuse

__all__ = [
    "ADMIN",
    "CODE",
    "METHODS",
    "OPEN",
    "SERVICE",
    "Answer",
    "Context",
    "Method",
    "abort",
    "identify",
    "parse",
    "unary",
]

_SERVICE = DESCRIPTOR.services_by_name["GRPCInferenceService"]
SERVICE = _SERVICE.full_name
OPEN = frozenset({"ServerLive", "ServerReady", "ModelReady"})
"""Calls that need no token."""
ADMIN = frozenset(
    {
        "RepositoryModelLoad",
        "RepositoryModelUnload",
        "SystemSharedMemoryStatus",
        "SystemSharedMemoryRegister",
        "SystemSharedMemoryUnregister",
        "TraceSetting",
        "LogSettings",
    }
)
"""Calls that change the server or show others' memory; they may need an admin token."""
_STATUS = {status.value[0]: status for status in grpc.StatusCode}
CODE = "x-fornax-code"
"""The metadatum behind a failed call that has the name of its `ServingCode`. A status without it is
not a server's word but the transport's."""
_MAX_DETAILS = 2048
"""Bytes; percent-encoding may triple them, and clients take 8 KiB of headers."""
_MAX_MESSAGE = 2**20
"""Bytes of a request other than ModelInfer, at most."""

_Message = TypeVar("_Message", bound=Message)
Context = grpc.aio.ServicerContext[bytes, bytes]
Answer = Callable[[Any], Awaitable[Message]]
"""From a request's message to the answer's."""


class Method:
    """One call of the service: its path, and the classes of what goes in and out."""

    def __init__(self, descriptor: MethodDescriptor):
        self.name = descriptor.name
        self.path = f"/{SERVICE}/{descriptor.name}"
        self.streams = descriptor.server_streaming
        self.request = message_factory.GetMessageClass(descriptor.input_type)
        self.response = message_factory.GetMessageClass(descriptor.output_type)


METHODS = {each.name: Method(each) for each in _SERVICE.methods}


def parse(kind: type[_Message], data: bytes) -> _Message:
    """Parse a message of class `kind`; ServingError where `data` is not one."""
    try:
        return kind.FromString(data)
    except DecodeError:
        raise refuse(f"{len(data)} bytes are no {kind.DESCRIPTOR.full_name}") from None


def identify(context: Context) -> str:
    """The id of a call, by `fornax.config.request_id`: that of its metadatum `x-request-id`, or a
    new one. It goes back to the client behind the answer or the error."""
    ours = tuple(context.trailing_metadata() or ())
    found = next((value for key, value in ours if key == HEADER), None)
    if found is not None:
        return str(found)
    given = next((v for key, v in context.invocation_metadata() or () if key == HEADER), None)
    name = request_id(given)
    context.set_trailing_metadata((*ours, (HEADER, name)))
    return name


async def abort(context: Context, error: ServingError) -> NoReturn:
    """End the call with the error's status and its message as the details."""
    details = str(error).encode("utf-8", "replace")[:_MAX_DETAILS].decode("utf-8", "ignore")
    trailing = ((CODE, error.code.name), (HEADER, identify(context)))
    await context.abort(_STATUS[error.code.grpc], details, trailing)
    raise AssertionError("abort returned")


def unary(method: Method, answer: Answer) -> grpc.RpcMethodHandler:
    """A unary handler; failures become statuses."""

    async def handle(data: bytes, context: Context) -> bytes:
        identify(context)
        try:
            if len(data) > _MAX_MESSAGE:
                raise ServingError(
                    ServingCode.TOO_LARGE,
                    f"the message has {len(data)} bytes; {method.name} takes {_MAX_MESSAGE}",
                )
            response = await answer(parse(method.request, data))
            return response.SerializeToString()
        except Exception as error:
            await abort(context, as_serving_error(error, method.name))

    return grpc.unary_unary_rpc_method_handler(handle)
