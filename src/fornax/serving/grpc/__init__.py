"""gRPC: the V2 inference service, its health and reflection, and a small client."""

from fornax.serving.grpc.server import GrpcServer

__all__ = ["GrpcServer"]
