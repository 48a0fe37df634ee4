"""What the HTTP servers are built on: a listening socket, and connections of stock uvicorn with
bounds.

Uvicorn bounds neither the head of a request, nor the time that it takes, nor how slowly a client
takes a response. `_Connection` does: it stands between the transport and uvicorn's protocol, and
knows of both what `asyncio.Protocol` and ASGI say. Pipelined requests are uvicorn's own affair: it
reads them faster than they are answered.
"""

import asyncio
import resource
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, cast

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from fornax.config.credentials import TOKEN_HEADER, Credentials
from fornax.config.errors import ConfigError

__all__ = [
    "ConnectionLimits",
    "HttpServer",
    "listen",
    "raise_file_limit",
    "replay",
    "server_config",
    "shown_address",
]

_BACKLOG = 2048
_LAST_SECONDS = 0.2
"""For what is cancelled at the end to tell its client."""
_LEAST = 64 * 1024
"""Bytes that a client must take in `send_timeout`."""
_END_OF_HEAD = b"\r\n\r\n"
_CROWDED = "this server has as many connections as it takes; try again later"
_LONG_HEAD = "the head of the request is larger than this server reads"
_STRANGER = "this is a replica, which answers the router of its launch alone; ask the router"
_TOKEN = TOKEN_HEADER.encode()
_STATE = "fornax.connection"
"""Where a request's ASGI state has its connection."""

ErrorBody = Callable[[int, str], bytes]
"""The JSON body of an error, of its status and its message."""


class ConnectionLimits(Protocol):
    """What a server allows its connections."""

    @property
    def max_header_bytes(self) -> int:
        """Largest head of a request; a larger one gets 431."""

    @property
    def header_timeout(self) -> float:
        """Seconds in which a request's head must arrive, else the connection is closed."""

    @property
    def send_timeout(self) -> float:
        """Seconds that a client may take no data that waits for it; then it is sent away."""

    @property
    def max_connections(self) -> int:
        """Connections open at once; more get 503."""


class _Connection(asyncio.Protocol):
    """A client's connection, handed on to uvicorn's protocol."""

    def __init__(self, limits: ConnectionLimits, opened: "set[_Connection]", long_head: bytes):
        self._limits = limits
        self._open = opened
        self._long_head = long_head
        self.protocol: asyncio.Protocol
        self._head = b""
        """What has come of a request's head."""
        self._ahead = 0
        """Bytes that came behind the body of the request in progress, at most."""
        self._in_head = True
        """Whether a head, or nothing, is under way; else a request is, of which the app knows or
        is about to."""
        self._body_read = False
        self._refused = False
        """Whether a head was; what still comes is thrown away."""
        self._timer: asyncio.TimerHandle | None = None
        self._sending: asyncio.TimerHandle | None = None
        self._unsent = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin; the first request's head is awaited."""
        self._transport = cast("asyncio.Transport", transport)
        self._loop = asyncio.get_running_loop()
        self._open.add(self)
        self._wait(self._limits.header_timeout)
        self.protocol.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client left, or was sent away."""
        self._stop_waiting()
        self._stop_watching()
        self._open.discard(self)
        # Nothing refers to itself then: a request's memory does not wait for the garbage collector.
        protocol, self.protocol = self.protocol, asyncio.Protocol()
        protocol.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Look how large a head becomes, and let uvicorn parse."""
        if self._refused:
            return
        if self._in_head:
            self._head = self._head + data if self._head else data.lstrip(b"\r\n")
            end = self._head.find(_END_OF_HEAD)
            if self._ahead + (len(self._head) if end < 0 else end) > self._limits.max_header_bytes:
                self._refuse_head()
                return
            if end >= 0:
                self._in_head, self._head = False, b""
                self._stop_waiting()  # a loop that is late is not the client's doing
            elif self._timer is None:
                self._wait(self._limits.header_timeout)
        elif self._body_read:
            self._ahead += len(data)
            if self._ahead > self._limits.max_header_bytes:
                self._transport.pause_reading()  # until the request in progress has its response
        self.protocol.data_received(data)

    def eof_received(self) -> bool | None:
        """The client sends no more."""
        return self.protocol.eof_received()

    def begin(self) -> None:
        """The app has a request."""
        self._stop_waiting()
        self._in_head, self._head = False, b""
        self._body_read, self._ahead = False, 0

    def body_read(self) -> None:
        """The app has all of the request."""
        self._body_read = True

    def end(self) -> None:
        """The app has responded: the connection is idle, or continues with what came meanwhile."""
        self._in_head = True
        if self._ahead:
            self._transport.resume_reading()
            self._wait(self._limits.header_timeout)

    def _refuse_head(self) -> None:
        self._transport.write(
            b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\nconnection: close\r\n\r\n%b"
            % (len(self._long_head), self._long_head)
        )
        if not self._transport.can_write_eof():  # TLS
            self._transport.close()
            return
        # A socket closed with data unread resets the connection, and the client may lose the
        # response: it is closed when the client has closed, or when a head's time is over.
        self._refused = True
        self._transport.write_eof()
        self._wait(self._limits.header_timeout)

    def _wait(self, seconds: float) -> None:
        self._stop_waiting()
        self._timer = self._loop.call_later(seconds, self._late)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        self._timer = None
        if self._transport.is_reading():
            self._transport.abort()
        else:  # it is not the client that is late
            self._wait(self._limits.header_timeout)

    def pause_writing(self) -> None:
        """The client takes its response more slowly than it is made: watch it."""
        self.protocol.pause_writing()
        if self._sending is None:
            self._watch()

    def resume_writing(self) -> None:
        """The client has nearly all."""
        self.protocol.resume_writing()
        self._stop_watching()

    def _stop_watching(self) -> None:
        """Stop watching how fast the client takes its response."""
        if self._sending is not None:
            self._sending.cancel()
            self._sending = None

    def _watch(self) -> None:
        self._unsent = self._transport.get_write_buffer_size()
        self._sending = self._loop.call_later(self._limits.send_timeout, self._check_progress)

    def _check_progress(self) -> None:
        self._sending = None
        if self._unsent - self._transport.get_write_buffer_size() < _LEAST:
            self._transport.abort()
        else:
            self._watch()


class _BoundedApp:
    """An app within the limits of its connections: tells each of its requests' ends."""

    def __init__(
        self,
        app: ASGIApp,
        limits: ConnectionLimits,
        error_body: ErrorBody,
        credentials: Credentials | None,
    ):
        self._app = app
        self._limits = limits
        self._credentials = credentials
        self._refusals = {503: error_body(503, _CROWDED), 401: error_body(401, _STRANGER)}
        self._long_head = error_body(431, _LONG_HEAD)
        self._open: set[_Connection] = set()

    def protocol(self, app_state: dict[str, object], **arguments: object) -> _Connection:
        """A new connection; uvicorn gives its own protocol's arguments."""
        connection = _Connection(self._limits, self._open, self._long_head)
        arguments["app_state"] = {**app_state, _STATE: connection}
        connection.protocol = AutoHTTPProtocol(**arguments)
        return connection

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond to a request."""
        connection: _Connection = scope["state"][_STATE]

        async def receive_and_tell() -> Message:
            message = await receive()
            if not message.get("more_body"):
                connection.body_read()
            return message

        crowded = len(self._open) > self._limits.max_connections
        connection.begin()
        try:
            if crowded:
                await self._refuse(503, send)
            elif not self._admits(scope):
                await self._refuse(401, send)
            else:
                await self._app(scope, receive_and_tell, send)
        finally:
            connection.end()

    def _admits(self, scope: Scope) -> bool:
        if self._credentials is None:
            return True
        given = next((value for name, value in scope["headers"] if name == _TOKEN), b"")
        return self._credentials.admit(given.decode("latin-1"))

    async def _refuse(self, status: int, send: Send) -> None:
        body = self._refusals[status]
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
        ]
        if status == 503:
            headers.append((b"retry-after", b"2"))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def server_config(
    app: ASGIApp,
    limits: ConnectionLimits,
    error_body: ErrorBody,
    *,
    keep_alive: float,
    root_path: str = "",
    proxy_headers: bool = False,
    certificate: str | Path | None = None,
    key: str | Path | None = None,
    client_ca: str | Path | None = None,
    credentials: Credentials | None = None,
) -> uvicorn.Config:
    """Uvicorn's configuration for an app whose connections are bounded.

    Args:
      error_body: the JSON of 401, 431 and 503, in the form of the app's own errors.
      keep_alive: seconds that an idle connection is kept.
      root_path: the path under which a proxy shows the app.
      proxy_headers: whether a proxy on this machine says who the client is.
      certificate: the TLS certificate chain; None for plain text.
      client_ca: the authority of the clients' certificates; None: they need none.
      credentials: of a launch whose router alone is answered, over TLS with their certificate,
        where they have one, instead of the above; None: everybody is.
    """
    bounded = _BoundedApp(app, limits, error_body, credentials)
    context = None if credentials is None else credentials.context(server=True)
    return uvicorn.Config(
        bounded,
        http=bounded.protocol,  # pyrefly: ignore[bad-argument-type]
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        proxy_headers=proxy_headers,
        root_path=root_path,
        backlog=_BACKLOG,
        timeout_keep_alive=keep_alive,  # pyrefly: ignore[bad-argument-type]
        ssl_certfile=certificate,
        ssl_keyfile=key,  # pyrefly: ignore[bad-argument-type]
        ssl_ca_certs=None if client_ca is None else str(client_ca),
        ssl_cert_reqs=ssl.CERT_NONE if client_ca is None else ssl.CERT_REQUIRED,
        ssl_context_factory=None if context is None else lambda config, default: context,
    )


class HttpServer:
    """A uvicorn server in the running event loop, which leaves signals to the process."""

    def __init__(self, config: uvicorn.Config, bind: Callable[[], socket.socket]):
        """`bind` takes the address that `start` listens on."""
        self._config = config
        self._bind = bind
        self._server = uvicorn.Server(config)
        self._listener: socket.socket | None = None
        self._path: Path | None = None
        """Of a Unix socket."""
        self._loop: asyncio.Task[None] | None = None

    async def start(self) -> tuple[str, int]:
        """Answer from now on; host and port, or a Unix socket's path and 0.

        OSError when the address is not to be had.
        """
        self._listener = self._bind()
        try:
            # The steps of `Server.serve`, but for the signals, which are the process's.
            self._config.load()
            self._server.lifespan = self._config.lifespan_class(self._config)
            await self._server.startup(sockets=[self._listener])
        except OSError:
            await self.stop()
            raise
        self._loop = asyncio.create_task(self._server.main_loop())
        if not isinstance(name := self._listener.getsockname(), str):
            return name[:2]
        self._path = Path(name)
        return name, 0

    async def stop(self, drain_seconds: float = 0.0) -> None:
        """Take no more connections, let requests in progress finish for this long, and end."""
        if self._loop is not None:
            loop, self._loop = self._loop, None
            self._config.timeout_graceful_shutdown = max(1, round(drain_seconds))
            self._server.should_exit = True
            await loop
            await self._server.shutdown(sockets=[self._listener] if self._listener else None)
            if tasks := self._server.server_state.tasks:
                # Cancelled, they tell their clients so.
                await asyncio.wait(tasks, timeout=_LAST_SECONDS)
        if self._listener is not None:
            self._listener.close()
            self._listener = None
            if self._path is not None:
                self._path.unlink(missing_ok=True)


def replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that has the whole body, then what else comes."""
    given = False

    async def replayed() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replayed


def listen(host: str, port: int, send_timeout: float) -> socket.socket:
    """Take a TCP address, without answering yet.

    Linux closes a connection whose client acknowledges nothing for `send_timeout` seconds.

    Raises:
      ConfigError: the number is not a port; the system would take its last 16 bits.
      OSError: the address is not to be had.
    """
    if not 0 <= port <= 65535:
        raise ConfigError(f"port={port} is not a port; use 1 to 65535, or 0 for a free one")
    # asyncio sends small packets at once only of sockets whose protocol says that they are TCP's.
    family, kind, protocol, _, where = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # connections have it from the listener
            listener.setsockopt(
                socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(send_timeout * 1000)
            )
        listener.bind(where)
    except OSError as error:
        listener.close()
        raise OSError(error.errno, error.strerror, shown_address(host, port)) from None
    return listener


def shown_address(host: str, port: int) -> str:
    """`host:port`, with brackets around the host of IPv6."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def raise_file_limit() -> None:
    """Allow as many open files as the system does: each connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
