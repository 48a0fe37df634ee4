"""A fake host behind the app: called directly, and behind a socket in a thread of its own."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import uvloop
from tests.unit.serving.http.fake import FakeHost

from fornax.serving.access import Limits
from fornax.serving.config import Address
from fornax.serving.http import http_app, http_server
from fornax.serving.v2.shared_memory import SharedMemory

LIMITS = Limits(
    max_body_bytes=1 << 20,
    max_tensor_bytes=1 << 19,
    max_tensors=8,
    max_header_bytes=4096,
    header_timeout=0.3,
    body_timeout=0.3,
    send_timeout=0.3,
    keep_alive=5.0,
    max_connections=40,
)
PATIENT = replace(
    LIMITS,
    header_timeout=60.0,
    body_timeout=60.0,
    send_timeout=60.0,
    keep_alive=60.0,
    max_connections=400,
)
"""For honest clients on a busy machine, which may see late that connections ended."""


@dataclass
class Running:
    """A server with a fake host."""

    host: FakeHost
    shared_memory: SharedMemory
    address: Address
    loop: asyncio.AbstractEventLoop

    @property
    def url(self) -> str:
        return str(self.address)

    def call(self, function: Callable[[], Any]) -> Any:
        """Run a function in the server's thread."""

        async def called() -> Any:
            return function()

        return asyncio.run_coroutine_threadsafe(called(), self.loop).result(120)


@pytest.fixture(scope="session")
def serve() -> Iterator[Callable[..., Running]]:
    """Starts servers, each in a thread; they end with the session."""
    stops: list[Callable[[], None]] = []

    def start(limits: Limits = PATIENT, **options: Any) -> Running:
        started, ready = threading.Event(), []

        async def run() -> None:
            host, memory = FakeHost(), SharedMemory()
            app = http_app(host, limits=limits, shared_memory=memory, **options)
            server = http_server(app, Address("127.0.0.1", 0), limits)
            running = Running(
                host, memory, Address(*await server.start()), asyncio.get_running_loop()
            )
            done = asyncio.Event()
            ready.append(running)
            stops.append(lambda: running.loop.call_soon_threadsafe(done.set))
            started.set()
            await done.wait()
            await server.stop(1)

        thread = threading.Thread(target=lambda: uvloop.run(run()), daemon=True)
        thread.start()
        assert started.wait(120)
        stops.append(lambda: thread.join(120))
        return ready[0]

    yield start
    for stop in stops:
        stop()


@pytest.fixture(scope="session")
def server(serve: Callable[..., Running]) -> Running:
    """One server for all tests that need a socket and no clock."""
    return serve(metrics=lambda: (b"up 1\n", "text/plain; version=0.0.4"))


@dataclass
class Answer:
    """What the app sent."""

    status: int
    headers: dict[str, str]
    body: bytes


class Caller:
    """Calls the app without a socket."""

    def __init__(self, **options: Any):
        self.host = FakeHost()
        self.memory = SharedMemory()
        self.app = http_app(self.host, **{"limits": LIMITS, "shared_memory": self.memory} | options)

    def __call__(
        self,
        method: str,
        path: str,
        body: bytes | list[bytes] = b"",
        headers: dict[str, str] | None = None,
        *,
        leave: bool = False,
    ) -> Answer:
        return asyncio.run(self.call(method, path, body, headers, leave=leave))

    async def call(
        self,
        method: str,
        path: str,
        body: bytes | list[bytes] = b"",
        headers: dict[str, str] | None = None,
        *,
        leave: bool = False,
    ) -> Answer:
        parts = body if isinstance(body, list) else [body]
        incoming = [
            {"type": "http.request", "body": part, "more_body": at < len(parts) - 1}
            for at, part in enumerate(parts)
        ]
        sent: list[Any] = []

        async def receive() -> Any:
            if incoming:
                return incoming.pop(0)
            if not leave:
                await asyncio.Event().wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "scheme": "http",
            "server": ("127.0.0.1", 80),
            "client": ("127.0.0.1", 1),
            "headers": [
                (name.lower().encode(), value.encode("latin-1"))
                for name, value in (headers or {}).items()
            ],
        }
        await self.app(scope, receive, send)
        if not sent:
            return Answer(0, {}, b"")
        names = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
        return Answer(sent[0]["status"], names, b"".join(each["body"] for each in sent[1:]))


@pytest.fixture
def make_caller() -> type[Caller]:
    return Caller


@pytest.fixture(scope="session")
def _caller() -> Caller:
    return Caller()


@pytest.fixture
def call(_caller: Caller) -> Caller:
    """The app with its host as new."""
    _caller.host.reset()
    return _caller


@pytest.fixture
def tight() -> Limits:
    return replace(LIMITS, max_body_bytes=1000)
