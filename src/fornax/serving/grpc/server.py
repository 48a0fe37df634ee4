"""The gRPC server: the V2 inference service, health and reflection, on the running event loop."""

import asyncio
from typing import Any, Literal

import grpc
import grpc.aio

from fornax.config.errors import ConfigError
from fornax.serving.access import Auth, Limits, Tls
from fornax.serving.grpc import health, reflection
from fornax.serving.grpc.calls import Table, unary
from fornax.serving.grpc.inference import Inference
from fornax.serving.grpc.management import ADMIN, OPEN, Management
from fornax.serving.grpc.messages import METHODS
from fornax.serving.grpc.stream import Streams
from fornax.serving.v2.shared_memory import SharedMemory

__all__ = ["Compression", "GrpcServer"]

Compression = Literal["none", "deflate", "gzip"]
_COMPRESSION = {
    "none": grpc.Compression.NoCompression,
    "deflate": grpc.Compression.Deflate,
    "gzip": grpc.Compression.Gzip,
}
_PING_ALLOWED = 10_000
"""Milliseconds between a client's own pings, at least."""
_LINGER_SECONDS = 0.2
"""How long a stopping server still says so itself."""
_SPARE_CALLS = 1024
"""Calls at once beside inferences: health, metadata, streams."""


class GrpcServer:
    """Serves a Host over gRPC. Everything runs on the loop that `start` is called in."""

    def __init__(
        self,
        host: Any,
        address: str,
        *,
        limits: Limits | None = None,
        auth: Auth | None = None,
        admin: Auth | None = None,
        tls: Tls | None = None,
        shared_memory: SharedMemory | None = None,
        trace_sample_rate: float = 0.0,
        compression: Compression = "none",
    ):
        """Nothing listens yet.

        Args:
          host: the server's Host, or what has its methods.
          address: `host:port`, port 0 for any; or `unix:PATH`.
          auth: the tokens of which a call must present one, liveness and readiness excepted.
          admin: the tokens for calls that change the server; None: those of `auth`.
          shared_memory: the registry that HTTP has too; None: shared memory is refused.
          trace_sample_rate: share of requests that is traced, for clients that ask.
          compression: of answers; requests come as their client likes.
        """
        self._host = host
        self._address = str(address)
        self._limits = limits or Limits()
        self._auth = auth
        self._admin = admin or auth
        self._tls = tls
        self._compression = _COMPRESSION[compression]
        memory = SharedMemory(enabled=False) if shared_memory is None else shared_memory
        self._inference = Inference(host, self._limits, memory)
        self._streams = Streams(self._inference, self._limits)
        self._management = Management(host, memory, trace_sample_rate)
        self._health: health.Health | None = None
        self._server: grpc.aio.Server | None = None

    @property
    def running(self) -> int:
        """Inferences being answered."""
        return self._inference.running

    async def start(self) -> int:
        """Listen; return the port (0 for a Unix socket).

        Raises:
          OSError: the address cannot be bound.
          ConfigError: the certificate or its key cannot be read.
        """
        credentials = None if self._tls is None else _credentials(self._tls)
        self._health = health.Health(self._host)
        server = grpc.aio.server(
            handlers=[self._table(self._health)],
            options=_options(self._limits),
            maximum_concurrent_rpcs=self._limits.max_concurrent_requests + _SPARE_CALLS,
            compression=self._compression,
        )
        port = _bind(server, self._address, credentials)
        await server.start()
        self._server = server
        return port

    def _table(self, checks: health.Health) -> Table:
        table = Table(self._host.events)
        table.add(METHODS["ModelInfer"].path, self._inference.handler(), self._auth)
        table.add(METHODS["ModelStreamInfer"].path, self._streams.handler(), self._auth)
        for name, answer in self._management.answers().items():
            auth = self._admin if name in ADMIN else None if name in OPEN else self._auth
            table.add(METHODS[name].path, unary(METHODS[name], answer), auth)
        for name, handler in checks.handlers().items():
            auth = self._auth if name == "List" else None  # it names the models
            table.add(f"/{health.NAME}/{name}", handler, auth)
        for name, handler in reflection.handlers().items():
            for service in reflection.NAMES:
                table.add(f"/{service}/{name}", handler, self._auth)
        return table

    async def stop(self, drain_seconds: float = 0.0) -> None:
        """Take no new calls, answer those that run for at most `drain_seconds`, close.

        May be called again when it was cancelled.
        """
        if self._server is None:
            return
        self._inference.stopping = True
        self._streams.close()
        if self._health is not None:
            self._health.close()
        # What is on its way is told to go elsewhere; the transport would only say CANCELLED.
        linger = min(drain_seconds, _LINGER_SECONDS)
        await asyncio.sleep(linger)
        await self._server.stop(drain_seconds - linger)
        self._server = None
        self._inference.close()
        if self._health is not None:
            self._health.detach()
            self._health = None


def _bind(server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None) -> int:
    try:
        if credentials is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise OSError(f"gRPC cannot listen at {address}: {error}") from None
    unix = address.startswith("unix:")
    if not port and not unix:
        raise OSError(f"gRPC cannot listen at {address}")
    return 0 if unix else port


def _credentials(tls: Tls) -> grpc.ServerCredentials:
    try:
        pair = tls.key.read_bytes(), tls.cert.read_bytes()
        roots = None if tls.client_ca is None else tls.client_ca.read_bytes()
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be read: {error.strerror}") from None
    return grpc.ssl_server_credentials([pair], roots, require_client_auth=roots is not None)


def _options(limits: Limits) -> list[tuple[str, int]]:
    """What the transport is held to."""
    # Half of the time without a sign of the client, then a ping, half of it for the answer.
    half = max(int(limits.send_timeout * 500), 1)
    options = [
        ("grpc.so_reuseport", 0),  # else two servers share a port without a word
        ("grpc.max_receive_message_length", limits.max_body_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_metadata_size", limits.max_header_bytes),
        ("grpc.max_concurrent_streams", limits.max_concurrent_requests),
        ("grpc.max_allowed_incoming_connections", limits.max_connections),
        ("grpc.max_connection_idle_ms", int(limits.keep_alive * 1000)),
        ("grpc.keepalive_time_ms", half),
        ("grpc.keepalive_timeout_ms", half),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", _PING_ALLOWED),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", _PING_ALLOWED),
    ]
    # The transport counts in 32 bits; its own messages end at 2 GiB.
    return [(name, min(value, 2**31 - 1)) for name, value in options]
