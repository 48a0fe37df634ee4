"""The listening side of gRPC: address, TLS, tokens, bounds of connections, reflection."""

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal, TypeAlias

import grpc
import grpc.aio
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

from fornax.config.credentials import TOKEN_HEADER, Credentials
from fornax.config.errors import ConfigError, ServingCode, ServingError
from fornax.serving.access import Auth, Limits, Tls
from fornax.serving.config import Address
from fornax.serving.grpc import inference_pb2
from fornax.serving.grpc.methods import ADMIN, METHODS, OPEN, SERVICE, Context, abort

__all__ = ["Compression", "Front", "Listening"]

Compression = Literal["none", "deflate", "gzip"]
_COMPRESSION = {
    "none": grpc.Compression.NoCompression,
    "deflate": grpc.Compression.Deflate,
    "gzip": grpc.Compression.Gzip,
}
_PING_ALLOWED = 10_000
"""Milliseconds between a client's own pings, at least."""
_LINGER_SECONDS = 0.2
"""Seconds for which a stopping server still answers UNAVAILABLE itself."""
_SPARE_CALLS = 1024
"""Calls at once beside inferences: health, metadata, streams."""
_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
_REFLECTION = "grpc.reflection.v1.ServerReflection"
"""The same messages as those of v1alpha, which grpcio-reflection has."""
Refused = Callable[[ServingError], None]
"""Told of a call that is refused before its handler."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Front:
    """Where a gRPC server listens, and whom it lets in."""

    address: Address
    """Port 0 for any."""
    limits: Limits = dataclasses.field(default_factory=Limits)
    auth: Auth | None = None
    """The tokens of which a call must present one, liveness and readiness excepted."""
    admin: Auth | None = None
    """The tokens for calls that change the server; None: those of `auth`."""
    tls: Tls | None = None
    credentials: Credentials | None = None
    """Of a launch whose router alone is answered, over TLS with their certificate, where they have
    one, instead of `tls`; None: everybody is."""
    compression: Compression = "none"
    """Of answers; requests come as their client likes."""

    async def listen(
        self,
        handlers: dict[str, _Handler],
        health: health_pb2_grpc.HealthServicer,
        refused: Refused,
    ) -> "Listening":
        """Serve the V2 service, health and reflection in the running event loop.

        Args:
          handlers: of the service's methods by name.
          health: answers health calls.
          refused: told of calls that are refused before their handler.

        Raises:
          OSError: the address cannot be bound.
          ConfigError: the certificate or its key cannot be read.
        """
        server = grpc.aio.server(
            interceptors=self._interceptors(refused),
            options=_options(self.limits),
            maximum_concurrent_rpcs=self.limits.max_concurrent_requests + _SPARE_CALLS,
            compression=_COMPRESSION[self.compression],
        )
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        health_pb2_grpc.add_HealthServicer_to_server(health, server)
        _add_reflection(server)
        port = _bind(server, self.address, self._certificate())
        await server.start()
        return Listening(server, Address(self.address.host, port))

    def _certificate(self) -> grpc.ServerCredentials | None:
        """The credentials of TLS; None for plain text."""
        if self.credentials is None:
            return None if self.tls is None else _credentials(self.tls)
        if not self.credentials.key:
            return None
        shown = self.credentials.certificate.encode()
        pair = self.credentials.key.encode(), shown
        return grpc.ssl_server_credentials([pair], shown, require_client_auth=True)

    def _interceptors(self, refused: Refused) -> list[grpc.aio.ServerInterceptor]:
        """The token checks, where there are tokens. Health.List needs one: it names the models."""
        router = [] if self.credentials is None else [_RouterOnly(self.credentials, refused)]
        admin = self.admin or self.auth
        if not any(auth is not None and auth.enabled for auth in (self.auth, admin)):
            return [*router]
        auths = {
            **{METHODS[name].path: None for name in OPEN},
            **{METHODS[name].path: admin for name in ADMIN},
            "/grpc.health.v1.Health/Check": None,
            "/grpc.health.v1.Health/Watch": None,
        }
        return [*router, _Tokens(auths, self.auth, refused)]


@dataclasses.dataclass(frozen=True)
class Listening:
    """A server that listens."""

    server: grpc.aio.Server
    address: Address

    async def stop(self, drain_seconds: float) -> None:
        """Take no new calls, let those that run continue for at most `drain_seconds`, close."""
        # What is on its way is told to go elsewhere; the transport would only say CANCELLED.
        linger = min(drain_seconds, _LINGER_SECONDS)
        await asyncio.sleep(linger)
        await self.server.stop(drain_seconds - linger)


class _Tokens(grpc.aio.ServerInterceptor):
    """Refuses calls without a token: `auths` by path, `default` for every other path."""

    def __init__(self, auths: Mapping[str, Auth | None], default: Auth | None, refused: Refused):
        self._auths, self._default, self._refuse = auths, default, refused

    async def intercept_service(
        self,
        continuation: "Callable[[grpc.HandlerCallDetails], Awaitable[_Handler | None]]",
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "_Handler | None":
        """The handler of a call, or one that refuses it."""
        handler = await continuation(handler_call_details)
        auth = self._auths.get(handler_call_details.method, self._default)
        if handler is None or auth is None or not auth.enabled:
            return handler
        sent = dict(handler_call_details.invocation_metadata).get("authorization")
        if auth.admits(sent):
            return handler
        why = "none was sent" if sent is None else "it is none that this server knows"
        return _refusing(
            handler,
            self._refuse,
            f"this call needs a token, and {why}; send metadata `authorization: Bearer TOKEN`",
        )


class _RouterOnly(grpc.aio.ServerInterceptor):
    """Refuses calls, of whatever service, that do not come from the router of the launch."""

    def __init__(self, credentials: Credentials, refused: Refused):
        self._credentials, self._refuse = credentials, refused

    async def intercept_service(
        self,
        continuation: "Callable[[grpc.HandlerCallDetails], Awaitable[_Handler | None]]",
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "_Handler | None":
        """The handler of a call, or one that refuses it."""
        handler = await continuation(handler_call_details)
        sent = dict(handler_call_details.invocation_metadata).get(TOKEN_HEADER, "")
        if handler is None or self._credentials.admit(sent):
            return handler
        return _refusing(
            handler,
            self._refuse,
            "this is a replica, which answers the router of its launch alone; call the router",
        )


def _refusing(handler: _Handler, refused: Refused, why: str) -> _Handler:
    """A handler in place of another one, which refuses the call."""
    error = ServingError(ServingCode.UNAUTHENTICATED, why)
    refused(error)

    async def refuse_call(_: object, context: Context) -> None:
        await abort(context, error)

    if handler.response_streaming:
        return grpc.stream_stream_rpc_method_handler(refuse_call)
    return grpc.unary_unary_rpc_method_handler(refuse_call)


def _add_reflection(server: grpc.aio.Server) -> None:
    """Serve reflection of the V2 service, v1alpha and v1, for clients such as grpcurl."""
    pool = DescriptorPool()
    for file in (inference_pb2, health_pb2, reflection_pb2):
        pool.AddSerializedFile(file.DESCRIPTOR.serialized_pb)
    names = (SERVICE, "grpc.health.v1.Health", reflection.SERVICE_NAME)
    servicer = reflection.aio.ReflectionServicer(names, pool=pool)
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, server)
    newer = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        reflection_pb2.ServerReflectionRequest.FromString,
        reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(_REFLECTION, {"ServerReflectionInfo": newer}),)
    )


def _bind(
    server: grpc.aio.Server, address: Address, credentials: grpc.ServerCredentials | None
) -> int:
    """The port; OSError where the address is not to be had."""
    try:
        if credentials is None:
            port = server.add_insecure_port(str(address))
        else:
            port = server.add_secure_port(str(address), credentials)
    except RuntimeError as error:
        raise OSError(f"gRPC cannot listen at {address}: {error}") from None
    if not port:
        raise OSError(f"gRPC cannot listen at {address}")
    return port


def _credentials(tls: Tls) -> grpc.ServerCredentials:
    try:
        pair = tls.key.read_bytes(), tls.cert.read_bytes()
        roots = None if tls.client_ca is None else tls.client_ca.read_bytes()
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be read: {error.strerror}") from None
    return grpc.ssl_server_credentials([pair], roots, require_client_auth=roots is not None)


def _options(limits: Limits) -> list[tuple[str, int]]:
    """Channel arguments from the limits."""
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
