"""gRPC: the V2 inference service, its health and reflection, and a small client."""

from fornax.serving.grpc.client import Client

__all__ = ["Client"]
