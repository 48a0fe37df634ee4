"""Reflection: clients such as grpcurl ask which services and messages the server has."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool

from fornax.serving.failures import as_serving_error
from fornax.serving.grpc.calls import fail, parse
from fornax.serving.grpc.messages import POOL, SERVICE, SERVICE_FILE
from fornax.serving.grpc.standard import FILES, HEALTH, REFLECTIONS, reflection_message

__all__ = ["NAMES", "handlers"]

NAMES = REFLECTIONS
_Request = reflection_message("ServerReflectionRequest")
_Response = reflection_message("ServerReflectionResponse")


def _serialized(file: Any) -> bytes:
    copy = descriptor_pb2.FileDescriptorProto()
    file.CopyToProto(copy)
    return copy.SerializeToString()


def _pool() -> descriptor_pool.DescriptorPool:
    """Our own services and the standard ones in one pool."""
    pool = descriptor_pool.DescriptorPool()
    ours = POOL.FindFileByName(SERVICE_FILE)
    for file in (*ours.dependencies, ours):
        pool.AddSerializedFile(_serialized(file))
    for file in FILES:
        pool.AddSerializedFile(file.SerializeToString())
    return pool


def _with_dependencies(file: Any, found: dict[str, bytes]) -> dict[str, bytes]:
    """A file and those that it needs, by name."""
    if file.name not in found:
        found[file.name] = _serialized(file)
        for each in file.dependencies:
            _with_dependencies(each, found)
    return found


def _answer(pool: descriptor_pool.DescriptorPool, request: Any) -> Any:
    """What one request asks for, or the error in its answer."""
    response = _Response(valid_host=request.host, original_request=request)
    asked = request.WhichOneof("message_request")
    try:
        if asked == "list_services":
            for name in (SERVICE, HEALTH, *NAMES):
                response.list_services_response.service.add(name=name)
        elif asked in ("file_by_filename", "file_containing_symbol"):
            find = {
                "file_by_filename": pool.FindFileByName,
                "file_containing_symbol": pool.FindFileContainingSymbol,
            }[asked]
            files = _with_dependencies(find(getattr(request, asked)), {})
            response.file_descriptor_response.file_descriptor_proto.extend(files.values())
        elif asked == "all_extension_numbers_of_type":
            name = request.all_extension_numbers_of_type
            pool.FindMessageTypeByName(name)
            response.all_extension_numbers_response.base_type_name = name
        else:  # extensions, of which there are none, or nothing
            raise KeyError(asked)
    except KeyError:
        code, text = grpc.StatusCode.NOT_FOUND.value
        response.error_response.error_code = code
        response.error_response.error_message = f"{text}: this server has no such thing"
    return response


def handlers() -> dict[str, grpc.RpcMethodHandler]:
    """The handlers by the service's methods, the same for every version of it."""
    pool = _pool()

    async def answer(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        try:
            async for each in requests:
                yield _answer(pool, parse(_Request, each)).SerializeToString()
        except Exception as error:
            await fail(context, as_serving_error(error, "ServerReflectionInfo"))

    return {"ServerReflectionInfo": grpc.stream_stream_rpc_method_handler(answer)}
