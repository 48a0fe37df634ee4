"""The app of a router: hands each request to a replica and its response back, as it comes.

A request whose replica dies before any byte of the response was passed on goes to another one.
Once a byte was, it does not: a stream of events then ends with an error event, any other response
is cut off. So no part of a response reaches the client twice.
"""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

import aiohttp
import orjson
from starlette.types import Message, Receive, Scope, Send
from yarl import URL

from fornax.cluster.routing.changes import Changes
from fornax.cluster.routing.metrics import RouterMetrics
from fornax.cluster.routing.pool import Replica, ReplicaPool
from fornax.cluster.routing.prefixes import block_keys, prompt_of
from fornax.cluster.routing.service import Service
from fornax.cluster.routing.tracing import HEADER as TRACE_HEADER
from fornax.cluster.routing.tracing import RequestTrace, begin_trace
from fornax.config.credentials import TOKEN_HEADER, Credentials
from fornax.config.request_id import HEADER
from fornax.config.tracing import Spans
from fornax.llm.server.generation import CancelOnDisconnect
from fornax.serving.http.gate import path_of
from fornax.serving.http.request_ids import request_id_of
from fornax.serving.http.responses import Headers, Response, send_response

__all__ = ["Proxy", "Request", "client_session", "exchange"]

_HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer "
    b"transfer-encoding upgrade content-length expect".split()
)
"""Headers of one connection (RFC 9110, 7.6.1), and those that the client makes again."""
_NOT_SENT = _HOP_BY_HOP | {TOKEN_HEADER.encode(), HEADER.encode()}
_REPLACED = _HOP_BY_HOP | {b"date", b"server", HEADER.encode()}
_WHOLE = 8 * 2**20
"""Largest response of known length that is held until it is whole, so that it can be retried."""
_LONGEST_EVENT = 2**20
"""Bytes of an event that are held until it is whole."""
_REFUSALS = (429, 503)
"""A full or stopping replica; another one may take the request."""
_CLIENT_CLOSED = 499
_AUTOMATIC = ("Accept", "Accept-Encoding", "User-Agent", "Content-Type")
_CONNECT_SECONDS = 5.0


class _NotConnectedError(Exception):
    """The replica took no connection: the request did not reach it."""


class _BrokenError(Exception):
    """The connection ended before a byte of the response was passed on."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request as a replica gets it."""

    method: str
    path: str
    """Without query, and without the path under which a proxy shows the server."""
    target: str
    """Path and query, as they came."""
    headers: list[tuple[str, str]]
    body: bytes
    keys: list[int]
    """Of the prompt's blocks."""


def client_session(credentials: Credentials) -> aiohttp.ClientSession:
    """Connections to replicas: kept, uncounted, without a limit of time on a response.

    Args:
      credentials: what the replicas know the router by, and it them where they have a certificate.
    """
    context = credentials.context(server=False)
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(
            limit=0, keepalive_timeout=10.0, ssl=True if context is None else context
        ),
        headers={TOKEN_HEADER: credentials.token},
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        skip_auto_headers=_AUTOMATIC,
    )


def exchange(
    session: aiohttp.ClientSession, replica: Replica, request: Request
) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
    """Send a request to a replica; leaving the context early cancels it there."""
    return session.request(
        request.method,
        URL(replica.url + request.target, encoded=True),
        headers=request.headers,
        data=request.body or None,
        allow_redirects=False,
    )


class Proxy:
    """An ASGI app whose requests come with their whole body in one message."""

    def __init__(
        self,
        service: Service,
        pool: ReplicaPool,
        session: aiohttp.ClientSession,
        changes: Changes,
        metrics: RouterMetrics,
        spans: Spans | None = None,
    ):
        self._service = service
        self._pool = pool
        self._session = session
        self._changes = changes
        self._metrics = metrics
        self._spans = spans

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond to a request."""
        if scope["type"] != "http":
            raise RuntimeError(f"{scope['type']} is not routed")
        path, method = path_of(scope), scope["method"]
        body = (await receive()).get("body", b"")
        if method in ("GET", "HEAD") and (own := await self._own(path, scope)) is not None:
            await send_response(send, own)
            return
        if not scope["path"].startswith("/"):
            await send_response(send, self._service.error(400, f"{path} is not a path of a server"))
            return
        request, exit_ = self._request(scope, path, body), _Exit(send)
        with self._traced(request, exit_) as routed:
            await self._respond(scope, routed, receive, exit_)

    @contextlib.contextmanager
    def _traced(self, request: Request, exit_: "_Exit") -> Iterator[Request]:
        """The request as replicas get it, in a span where it is traced."""
        if self._spans is None or not self._service.traced(request.path, request.method):
            yield request
            return
        trace = begin_trace(self._spans, request.headers)
        others = [each for each in request.headers if each[0] != TRACE_HEADER]
        headers = [*others, (TRACE_HEADER, trace.context.traceparent)]
        try:
            yield dataclasses.replace(request, headers=headers)
        finally:
            _end_trace(trace, request, exit_)

    async def _respond(
        self, scope: Scope, request: Request, receive: Receive, exit_: "_Exit"
    ) -> None:
        started = time.perf_counter()
        async with CancelOnDisconnect(receive) as client:
            exit_.client = client
            if self._service.changes(request.path, request.method):
                await self._to_all(request, exit_)
            else:
                await self._to_one(request, exit_)
        status = _CLIENT_CLOSED if client.disconnected else exit_.status
        self._metrics.request(exit_.replica, status, time.perf_counter() - started)
        if (context := scope.get("state", {}).get("context")) is not None:
            context.log_fields["replica"] = exit_.replica
            if client.disconnected:
                context.status = _CLIENT_CLOSED

    def _request(self, scope: Scope, path: str, body: bytes) -> Request:
        headers = [
            (name.decode(), value.decode(errors="replace"))  # aiohttp writes UTF-8 alone
            for name, value in scope["headers"]
            if name not in _NOT_SENT
        ]
        context = scope.get("state", {}).get("context")
        headers.append((HEADER, request_id_of(scope) if context is None else context.id))
        if scope.get("client"):
            headers.append(("x-forwarded-for", scope["client"][0]))
        headers.append(("x-forwarded-proto", scope.get("scheme", "http")))
        root = scope.get("root_path", "").encode()
        target = (scope.get("raw_path") or scope["path"].encode()).removeprefix(root)
        if scope["query_string"]:
            target += b"?" + scope["query_string"]
        keys: list[int] = []
        if scope["method"] == "POST" and self._pool.config.policy == "prefix-aware":
            keys = block_keys(prompt_of(path, body))
        return Request(
            method=scope["method"],
            path=path,
            target=target.decode("latin-1"),
            headers=headers,
            body=body,
            keys=keys,
        )

    async def _own(self, path: str, scope: Scope) -> Response | None:
        """The response of the router itself; None for what replicas respond to."""
        ready = self._pool.ready()
        if path in self._service.live:
            return 200, [], b""
        if path == self._service.ready:
            phases = {str(each.number): each.phase for each in self._pool.replicas.values()}
            document = {"ready": bool(ready), "replicas": phases}
            kind = (b"content-type", b"application/json")
            return (200 if ready else 503), [kind], orjson.dumps(document)
        if path == "/metrics":
            asked = [(name, value) for name, value in scope["headers"] if name == b"authorization"]
            headers = [(name.decode(), value.decode(errors="replace")) for name, value in asked]
            texts = await asyncio.gather(*(self._metrics_of(each, headers) for each in ready))
            found = {each: text for each, text in zip(ready, texts, strict=True) if text}
            body, kind = await asyncio.to_thread(self._metrics.exposition, found)
            return 200, [(b"content-type", kind.encode())], body
        return None

    async def _metrics_of(self, replica: Replica, headers: list[tuple[str, str]]) -> str:
        request = Request(
            method="GET", path="/metrics", target="/metrics", headers=headers, body=b"", keys=[]
        )
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                async with exchange(self._session, replica, request) as response:
                    return await response.text() if response.status == 200 else ""
        except (aiohttp.ClientError, OSError, TimeoutError):
            return ""

    async def _to_one(self, request: Request, exit_: "_Exit") -> None:
        """Have one replica respond; another one where it dies or refuses."""
        config, tried, broken = self._pool.config, set[Replica](), 0
        refusal: tuple[Replica, Response] | None = None
        while True:
            choice = self._pool.choose(request.keys, tried)
            if choice is None and refusal is not None:
                await exit_.whole(*refusal)
                return
            if choice is None:
                if not await self._pool.wait(config.queue_timeout):
                    why = f"no replica is ready, after {config.queue_timeout:g} s"
                    await exit_.error(self._service.error(503, f"{why}; try again later"))
                    return
                continue
            replica = choice.replica
            self._metrics.chosen(matched=choice.matched, blocks=len(request.keys))
            try:
                with replica.answering():
                    refused = await self._attempt(replica, request, exit_)
            except _NotConnectedError:
                self._pool.suspect(replica)
                continue
            except _BrokenError as error:
                self._pool.suspect(replica)
                broken += 1
                if broken > config.max_retries:
                    why = f"{broken} replicas ended while they answered this request ({error})"
                    await exit_.error(self._service.error(502, f"{why}; it is not tried again"))
                    return
                self._metrics.retry("broken")
                continue
            if refused is None:
                return
            tried.add(replica)
            self._metrics.retry("refused")
            refusal = replica, refused

    async def _attempt(self, replica: Replica, request: Request, exit_: "_Exit") -> Response | None:
        """Pass on what a replica says; its response, not passed on, where it refuses."""
        try:
            async with exchange(self._session, replica, request) as response:
                headers = _response_headers(response, replica)
                length = response.content_length
                refuses = response.status in _REFUSALS
                whole = length is not None and length <= _WHOLE and request.method != "HEAD"
                if refuses or whole:
                    answer = response.status, headers, await response.read()
                    if not refuses:
                        await exit_.whole(replica, answer)
                    return answer if refuses else None
                await self._stream(replica, response, headers, exit_)
        except aiohttp.ClientConnectorError as error:
            raise _NotConnectedError from error
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
            if exit_.started:
                raise
            raise _BrokenError(str(error) or type(error).__name__) from error
        return None

    async def _stream(
        self,
        replica: Replica,
        response: aiohttp.ClientResponse,
        headers: Headers,
        exit_: "_Exit",
    ) -> None:
        """Pass on a response piece by piece, its head with the first one."""
        events = response.content_type == "text/event-stream"
        if response.content_length is not None:
            headers.append((b"content-length", b"%d" % response.content_length))
        pieces = _whole_events(response) if events else response.content.iter_any()
        try:
            async for piece in pieces:
                await exit_.piece(replica, response.status, headers, piece)
        except (aiohttp.ClientError, ConnectionError):
            if not exit_.started:
                raise
            self._pool.suspect(replica)
            self._metrics.cut()
            why = f"replica {replica.number} ended while it answered; what came is not all"
            exit_.failure = why
            if events:
                _, _, body = self._service.error(502, why)
                await exit_.last(b"data: " + body + b"\n\n" + self._service.stream_end)
            else:
                exit_.status = 502  # uvicorn cuts off what has no end
            return
        await exit_.piece(replica, response.status, headers, b"")
        await exit_.last(b"")

    async def _to_all(self, request: Request, exit_: "_Exit") -> None:
        """Have every replica make a change; the first failure is the response."""
        key = request.target, request.body
        made = await self._changes.make(key, lambda each: self._change(each, request), _failed)
        if made is None:
            await exit_.error(self._service.error(503, "no replica is ready; try again later"))
        else:
            await exit_.whole(*made)

    async def _change(self, replica: Replica, request: Request) -> Response:
        try:
            async with exchange(self._session, replica, request) as response:
                headers = _response_headers(response, replica)
                return response.status, headers, await response.read()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            why = f"replica {replica.number} did not make the change ({error}); ask again"
            return self._service.error(502, why)


def _end_trace(trace: RequestTrace, request: Request, exit_: "_Exit") -> None:
    left = exit_.client is not None and exit_.client.disconnected
    status = _CLIENT_CLOSED if left else exit_.status
    error = exit_.failure or (f"status {status}" if status >= 400 or not status else "")
    trace.end(
        dict(request.headers)[HEADER],
        exit_.replica,
        {
            "http.request.method": request.method,
            "url.path": request.path,
            "http.response.status_code": status,
        },
        error,
    )


def _failed(answer: Response) -> bool:
    return answer[0] >= 400


class _Exit:
    """The way out to the client: knows what has been passed on."""

    def __init__(self, send: Send):
        self._send = send
        self.client: CancelOnDisconnect | None = None
        self.started = False
        self.status = 0
        self.replica: int | None = None
        self.failure = ""
        """Why a response that had begun is not whole."""

    async def whole(self, replica: Replica, response: Response) -> None:
        """A whole response of a replica's."""
        self.replica = replica.number
        await self.error(response)

    async def error(self, response: Response) -> None:
        """A whole response."""
        self.started, self.status = True, response[0]
        self._answered()
        await send_response(self._send, response)

    async def piece(self, replica: Replica, status: int, headers: Headers, body: bytes) -> None:
        """A piece of the body, after the head."""
        if not self.started:
            self.started, self.status, self.replica = True, status, replica.number
            start: Message = {"type": "http.response.start", "status": status, "headers": headers}
            await self._send(start)
        if body:
            await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def last(self, body: bytes) -> None:
        """The last piece."""
        self._answered()
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    def _answered(self) -> None:
        if self.client is not None:
            self.client.answered = True


def _response_headers(response: aiohttp.ClientResponse, replica: Replica) -> Headers:
    headers = [
        (name.lower(), value)
        for name, value in response.raw_headers
        if name.lower() not in _REPLACED
    ]
    return [*headers, (b"x-fornax-replica", b"%d" % replica.number)]


async def _whole_events(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """The pieces of an event stream, cut behind the ends of events: none is passed on in part."""
    rest = b""
    async for piece in response.content.iter_any():
        rest += piece
        end = rest.rfind(b"\n\n") + 2
        if end < 2 and len(rest) > _LONGEST_EVENT:
            end = len(rest)
        if end >= 2:
            yield rest[:end]
            rest = rest[end:]
    if rest:
        yield rest
