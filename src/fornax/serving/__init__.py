"""Serving: a server of exported models, over the V2 inference protocol (HTTP and gRPC)."""

__all__: list[str] = []
