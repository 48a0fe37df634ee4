"""What differs between the replicas of `fornax serve` and those of `fornax host`.

The front of a router is the one of the server behind it: the same address, TLS, tokens, limits of
bodies and connections, and form of errors. Its replicas answer the router alone: on loopback with
the token of the launch, on an address of a private network over TLS with its certificate too.
"""

import dataclasses
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from pydantic_core import to_json
from starlette.types import ASGIApp, Receive, Scope, Send

from fornax.config import dump_yaml
from fornax.config.errors import ConfigError, ServingError
from fornax.config.http_server import HttpServer, replay
from fornax.config.tracing import Spans
from fornax.llm.server.config import ServerConfig
from fornax.llm.server.errors import ApiError
from fornax.llm.server.launch import ServeConfig
from fornax.llm.server.listening import bind, uvicorn_config
from fornax.llm.server.middleware import RequestMiddleware, configure_logging
from fornax.serving.access import Limits
from fornax.serving.config import HostConfig
from fornax.serving.grpc.front import Front
from fornax.serving.http import bodies, http_server
from fornax.serving.http.bodies import BodyMemory, ClientLeft, HeldBodies, LateBody
from fornax.serving.http.gate import Gate, changes_server, path_of
from fornax.serving.http.request_ids import with_request_id
from fornax.serving.http.responses import Response, error_response, send_response
from fornax.serving.telemetry.logs import configure_logging as configure_host_logging

__all__ = ["Service", "host_service", "serve_service"]

_LOCAL = "127.0.0.1"
_KEEP_ALIVE = 75.0
"""Seconds that a replica keeps an idle connection of the router's, which ends it earlier: else a
request could be sent on one that is just being closed."""
_BODIES = 4
"""How many of the largest bodies the router of `fornax host` holds at once."""
_INFERS = re.compile(r"/v2/models/.+/(infer|generate|generate_stream)")
_ENGINE_CALLS = frozenset(
    {
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "/sleep",
        "/wake_up",
        "/reset_prefix_cache",
    }
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Service:
    """A command whose replicas are behind a router."""

    name: str
    """The command."""
    words: Callable[[str, int, int], Sequence[str]]
    """The words of a replica's command, of the address that it listens on and its ports for HTTP
    and gRPC."""
    server: Callable[[ASGIApp], HttpServer]
    """The server of the app that routes."""
    scheme: str
    """`http` or `https`."""
    live: frozenset[str]
    """Paths that ask whether the server lives."""
    partial: bool
    """Whether one that is not ready may have what is asked for: some models of several."""
    ready: str
    """The path that asks whether it takes requests."""
    error: Callable[[int, str], Response]
    """A response with an error, of its status and message."""
    stream_end: bytes
    """What ends a stream of events after an error."""
    changes: Callable[[str, str], bool]
    """Whether a call, by path and method, changes a replica, and so must reach all."""
    devices: int
    """Accelerators that a replica takes; 0: an equal share."""
    drain_seconds: float
    """Seconds that requests get to finish when the router stops."""
    grpc: Front | None = None
    """How it speaks gRPC; None: not at all."""
    traced: Callable[[str, str], bool]
    """Whether a call, by path and method, is one that replicas trace."""
    trace_endpoint: str | None
    """The collector of the spans; None: the router makes none."""
    trace_sample_rate: float
    """Share of requests to trace, among those whose caller did not decide."""
    configure_logging: Callable[[], None]

    def spans(self) -> Spans | None:
        """What makes the router's spans; None: it makes none.

        Raises:
          ConfigError: OpenTelemetry is not installed.
        """
        if self.trace_endpoint is None:
            return None
        return Spans(
            "fornax.cluster.routing",
            endpoint=self.trace_endpoint,
            sample_rate=self.trace_sample_rate,
        )


def serve_service(model: str, config: ServeConfig, folder: Path) -> Service:
    """`fornax serve MODEL` with a config.

    Args:
      folder: where the config of the replicas is written, readable by this user alone.
    """
    server = config.server()
    inner = dataclasses.replace(
        config,
        uds=None,
        ssl_keyfile=None,
        ssl_certfile=None,
        timeout_keep_alive=_KEEP_ALIVE,
    )
    file = _write(folder, inner)

    def http(app: ASGIApp) -> HttpServer:
        gated = RequestMiddleware(app, server, lambda context: None)
        return HttpServer(uvicorn_config(gated, server), lambda: bind(server))

    def words(host: str, port: int, _: int) -> list[str]:
        place = ["--host", host, "--port", str(port)]
        return ["serve", model, "--config", str(file), *place]

    return Service(
        name="serve",
        words=words,
        server=http,
        scheme="unix" if server.uds else "https" if server.ssl_certfile else "http",
        live=frozenset({"/health", "/ping"}),
        ready="/ready",
        partial=False,
        error=_openai_error,
        stream_end=b"data: [DONE]\n\n",
        changes=lambda path, method: method == "POST" and path in _ENGINE_CALLS,
        traced=lambda path, method: method == "POST" and path.startswith("/v1/"),
        trace_endpoint=server.otlp_traces_endpoint,
        trace_sample_rate=server.trace_sample_rate,
        devices=config.tensor_parallel_size,
        drain_seconds=server.shutdown_timeout,
        configure_logging=configure_logging,
    )


def _openai_error(status: int, message: str) -> Response:
    error = ApiError(status, message, retry_after=1.0 if status in (429, 503) else None)
    headers = [(b"content-type", b"application/json")]
    headers += [(name.lower().encode(), v.encode()) for name, v in (error.headers or {}).items()]
    return status, headers, to_json(error.body())


def host_service(config: HostConfig, folder: Path) -> Service:
    """`fornax host REPOSITORY` with a config, over HTTP and gRPC.

    Args:
      folder: where the config of the replicas is written, readable by this user alone.

    Raises:
      ConfigError: for a repository, address, token or certificate that is not to be had.
    """
    config.folder()
    config.check_access()
    address = config.http_address()
    if address is None:
        raise ConfigError(
            "http=none leaves a router nothing to ask for readiness and metrics on; give --http a "
            "port, or run fornax host without --replicas"
        )
    inner = dataclasses.replace(
        config,
        grpc_compression="none",
        tls_cert=None,
        tls_key=None,
        tls_client_ca=None,
        drain_delay_seconds=0.0,
        keep_alive=_KEEP_ALIVE,
        shared_memory="on" if config.shared_memory_allowed() else "off",
    )
    file = _write(folder, inner)
    auth, admin, limits = config.auth(), config.admin_auth(), config.limits()
    gate, grpc_address = Gate(auth, admin), config.grpc_address()

    def words(host: str, http: int, grpc: int) -> list[str]:
        grpc_place = "none" if grpc_address is None else f"{host}:{grpc}"
        found = ["host", "--config", str(file), "--http", f"{host}:{http}", "--grpc", grpc_place]
        if host != _LOCAL:  # on a private network, behind a router that asks for the tokens
            found += ["--shared-memory", "off", "--allow-anonymous"]
        return found

    return Service(
        name="host",
        words=words,
        server=lambda app: http_server(_V2Front(app, limits, gate), address, limits, config.tls()),
        scheme="https" if config.tls_cert else "http",
        live=frozenset({"/v2/health/live"}),
        ready="/v2/health/ready",
        partial=True,
        error=error_response,
        stream_end=b"",
        changes=lambda path, method: (
            method == "POST" and changes_server(path, method) and not path.startswith("/v2/profile")
        ),
        traced=lambda path, method: method == "POST" and _INFERS.fullmatch(path) is not None,
        trace_endpoint=config.trace_endpoint,
        trace_sample_rate=config.trace_sample_rate,
        devices=len(config.devices),
        drain_seconds=config.drain_seconds,
        grpc=None
        if grpc_address is None
        else Front(
            address=grpc_address,
            limits=limits,
            auth=auth,
            admin=admin,
            tls=config.tls(),
            compression=config.grpc_compression,
        ),
        configure_logging=lambda: configure_host_logging(config.log_format, config.log_level),
    )


class _V2Front:
    """Tokens and limits of the model server, before an app that reads whole bodies."""

    def __init__(self, app: ASGIApp, limits: Limits, gate: Gate):
        self._app = app
        self._limits = limits
        self._gate = gate
        self._memory = BodyMemory(_BODIES * limits.max_body_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond to a request."""
        limits = self._limits
        send = with_request_id(scope, send)
        with HeldBodies(self._memory) as held:
            try:
                try:
                    self._gate.check(path_of(scope), scope)
                except ServingError:
                    await bodies.drop(receive, limits, held)
                    raise
                body = await bodies.read(receive, limits, limits.max_body_bytes, held)
            except ServingError as error:
                await send_response(send, error_response(error.code.http, str(error)))
            except LateBody as error:
                await send_response(send, error_response(408, str(error)), close=True)
            except ClientLeft:
                pass
            else:
                await self._app(scope, replay(body, receive), send)


def _write(folder: Path, config: ServerConfig | HostConfig) -> Path:
    """The replicas' config as a file, since words would show its keys to every user."""
    path = folder / "replica.yaml"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(dump_yaml(config))
    return path
