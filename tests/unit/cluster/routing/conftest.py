"""Upstreams that are real HTTP servers, and a router before them, in one event loop."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import httpx
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from fornax.cluster.routing.changes import Changes
from fornax.cluster.routing.metrics import RouterMetrics
from fornax.cluster.routing.pool import Replica, ReplicaPool, RoutingConfig
from fornax.cluster.routing.proxy import Proxy, client_session
from fornax.cluster.routing.service import Service, host_service, serve_service
from fornax.config.credentials import Credentials
from fornax.config.http_server import HttpServer, listen, server_config
from fornax.llm.server import ServeConfig
from fornax.serving.access import Limits
from fornax.serving.config import HostConfig

Answer = Callable[["Upstream", Request, Send], Awaitable[None]]


async def reply(send: Send, status: int = 200, body: bytes = b"{}", **headers: str) -> None:
    """A whole response."""
    sent = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    sent.append((b"content-length", b"%d" % len(body)))
    await send({"type": "http.response.start", "status": status, "headers": sent})
    await send({"type": "http.response.body", "body": body})


async def start(send: Send, kind: str = "text/event-stream") -> None:
    """The head of a stream."""
    headers = [(b"content-type", kind.encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})


async def piece(send: Send, body: bytes, more: bool = True) -> None:
    """A piece of a stream."""
    await send({"type": "http.response.body", "body": body, "more_body": more})


class Upstream:
    """A server that notes what its router asks, and answers as the test asks."""

    def __init__(self, number: int, answer: Answer, credentials: Credentials):
        self.number = number
        self.answer = answer
        self.seen: list[Request] = []
        self.bodies: list[bytes] = []
        self.left = asyncio.Event()
        limits = Limits(max_connections=100)
        config = server_config(
            self, limits, lambda _, text: text.encode(), keep_alive=60.0, credentials=credentials
        )
        self.server = HttpServer(config, lambda: listen("127.0.0.1", 0, 60.0))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        self.seen.append(request)
        self.bodies.append(await request.body())
        await self.answer(self, request, send)

    async def until_left(self, request: Request) -> None:
        """Wait until the client has gone."""
        while (await request.receive())["type"] != "http.disconnect":
            pass
        self.left.set()


@dataclasses.dataclass
class Routed:
    """A router that runs, and its upstreams."""

    upstreams: list[Upstream]
    pool: ReplicaPool
    changes: Changes
    metrics: RouterMetrics
    client: httpx.AsyncClient

    async def complete(self, **fields: object) -> httpx.Response:
        """A completion."""
        return await self.client.post("/v1/completions", json={"prompt": "hello", **fields})


@contextlib.asynccontextmanager
async def routed(
    folder: Path,
    *answers: Answer,
    routing: RoutingConfig | None = None,
    host: HostConfig | None = None,
    credentials: Credentials | None = None,
    **options: object,
) -> AsyncIterator[Routed]:
    """A router before an upstream for each answer."""
    service: Service
    if host is None:
        service = serve_service("m", ServeConfig(port=0, **options), folder)  # pyrefly: ignore
    else:
        service = host_service(host, folder)
    pool = ReplicaPool(routing or RoutingConfig(), partial=service.partial)
    metrics = RouterMetrics(pool)
    known = credentials or Credentials.make()
    async with contextlib.AsyncExitStack() as stack:
        session = await stack.enter_async_context(client_session(known))
        changes = Changes(pool)
        spans = service.spans()
        if spans is not None:
            stack.push_async_callback(asyncio.to_thread, spans.close)
        proxy = Proxy(service, pool, session, changes, metrics, spans)
        upstreams = []
        for number, answer in enumerate(answers):
            upstreams.append(Upstream(number, answer, known))
            address, port = await upstreams[-1].server.start()
            stack.push_async_callback(upstreams[-1].server.stop)
            url = f"http{'s' if known.key else ''}://{address}:{port}"
            pool.add(Replica(number=number, url=url, phase="ready"))
        front = service.server(proxy)
        address, port = await front.start()
        stack.push_async_callback(front.stop)
        client = httpx.AsyncClient(base_url=f"http://{address}:{port}", timeout=60)
        await stack.enter_async_context(client)
        yield Routed(upstreams, pool, changes, metrics, client)
