"""gRPC: the V2 inference service, its health and reflection, and a small client."""
