"""Reflection: clients such as grpcurl ask which services and messages the server has."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from fornax.serving.grpc.calls import as_serving_error, fail, parse
from fornax.serving.grpc.health import NAME as HEALTH
from fornax.serving.grpc.messages import POOL, SERVICE, SERVICE_FILE

__all__ = ["NAME", "handlers"]

NAME: str = reflection.SERVICE_NAME


def _pool() -> descriptor_pool.DescriptorPool:
    """Our own services and the standard ones in one pool."""
    pool = descriptor_pool.DescriptorPool()
    ours = POOL.FindFileByName(SERVICE_FILE)
    for file in (*ours.dependencies, ours, health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR):
        copy = descriptor_pb2.FileDescriptorProto()
        file.CopyToProto(copy)
        pool.AddSerializedFile(copy.SerializeToString())
    return pool


def handlers() -> dict[str, grpc.RpcMethodHandler]:
    """The handlers by the service's methods."""
    servicer: Any = reflection.aio.ReflectionServicer((SERVICE, HEALTH, NAME), pool=_pool())

    async def answer(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        parsed = (parse(reflection_pb2.ServerReflectionRequest, each) async for each in requests)
        try:
            async for response in servicer.ServerReflectionInfo(parsed, context):
                yield response.SerializeToString()
        except Exception as error:
            await fail(context, as_serving_error(error, "ServerReflectionInfo"))

    return {"ServerReflectionInfo": grpc.stream_stream_rpc_method_handler(answer)}
