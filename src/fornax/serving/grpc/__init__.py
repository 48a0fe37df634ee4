"""gRPC: the V2 inference service, its health and reflection, and a small client.

The server is imported when it is first asked for, so that the client stays small.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fornax.serving.grpc.client import Client
    from fornax.serving.grpc.server import GrpcServer

__all__ = ["Client", "GrpcServer"]


def __getattr__(name: str) -> Any:
    if name == "GrpcServer":
        from fornax.serving.grpc.server import GrpcServer

        return GrpcServer
    if name == "Client":
        from fornax.serving.grpc.client import Client

        return Client
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
