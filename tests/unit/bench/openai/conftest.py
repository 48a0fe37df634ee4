"""A server in a thread that streams as OpenAI's do, and misbehaves as told."""

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

WORD = 7
"""/tokenize makes one token of N characters."""


@dataclass
class FakeServer:
    """What it was asked, and how it answers the completions to come."""

    url: str = ""
    first_s: float = 0.0
    gap_s: float = 0.0
    status: int = 200
    fail_every: int = 0
    """Every Nth request: status 503."""
    break_every: int = 0
    """Every Nth request: the connection closes in the middle of the stream."""
    close_after_answer: bool = False
    """Close the connection after each answer without saying so."""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    context: int | None = None
    connections: int = 0
    running: int = 0
    most_running: int = 0
    wait_for: int = 0
    """Streams begin only when so many have run at once."""
    warm_after: int = 0
    """/ready, or /health, fails so many times first."""
    knows_ready: bool = True

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer requests of one connection."""
        self.connections += 1
        gone = contextlib.suppress(ConnectionError, asyncio.IncompleteReadError)
        with contextlib.closing(writer), gone:  # closed when it is cancelled too
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                first, *lines = head.strip().split("\r\n")
                headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in lines)}
                body = await reader.readexactly(int(headers["content-length"]))
                await self._answer(first.split()[1], headers, body, writer)
                if self.close_after_answer:
                    break

    async def _answer(
        self, path: str, headers: dict[str, str], body: bytes, writer: asyncio.StreamWriter
    ) -> None:
        if path == "/v1/models":
            card = {"id": "fake", "max_model_len": self.context}
            return _send(writer, 200, {"data": [card]})
        if path == "/ready" and not self.knows_ready:
            return _send(writer, 404, {})
        if path in ("/ready", "/health"):
            self.warm_after -= 1
            return _send(writer, 503 if self.warm_after >= 0 else 200, {})
        asked = json.loads(body)
        if path == "/tokenize":
            count = -(-len(asked["prompt"]) // WORD)
            return _send(writer, 200, {"tokens": list(range(100, 100 + count))})
        if path == "/detokenize":
            return _send(writer, 200, {"prompt": " ".join(map(str, asked["tokens"]))})
        self.bodies.append(asked)
        self.headers.append(headers)
        number = len(self.bodies)
        if self.status != 200 or (self.fail_every and number % self.fail_every == 0):
            status = self.status if self.status != 200 else 503
            return _send(writer, status, {"error": {"message": "no room", "code": status}})
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        broken = bool(self.break_every) and number % self.break_every == 0
        try:
            await self._stream(asked, writer, broken, chat="messages" in asked)
        finally:
            self.running -= 1

    async def _stream(
        self, asked: dict[str, Any], writer: asyncio.StreamWriter, broken: bool, chat: bool
    ) -> None:
        count = asked.get("max_tokens") or asked["max_completion_tokens"]
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        if chat:
            _chunk(writer, {"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        while self.most_running < self.wait_for:
            await asyncio.sleep(0.001)
        await asyncio.sleep(self.first_s)
        for number in range(count):
            if broken and number == count // 2:
                writer.close()
                return
            if number:
                await asyncio.sleep(self.gap_s)
            text = {"delta": {"content": "a"}} if chat else {"text": "a"}
            _chunk(writer, {"choices": [text]})
            await writer.drain()
        usage = {"prompt_tokens": len(asked.get("prompt", "")), "completion_tokens": count}
        _chunk(writer, {"choices": [], "usage": usage})
        _chunk(writer, "[DONE]")
        writer.write(b"0\r\n\r\n")
        await writer.drain()


def _send(writer: asyncio.StreamWriter, status: int, content: dict[str, Any]) -> None:
    body = json.dumps(content).encode()
    writer.write(f"HTTP/1.1 {status} x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)


def _chunk(writer: asyncio.StreamWriter, event: Any) -> None:
    data = f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode()
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


@pytest.fixture
def server() -> Iterator[FakeServer]:
    """The server, stopped after the test."""
    fake = FakeServer()
    ready = threading.Event()
    stop: list[Any] = []

    async def run() -> None:
        done = asyncio.Event()
        stop.extend((asyncio.get_running_loop(), done))
        listening = await asyncio.start_server(fake.handle, "127.0.0.1", 0, backlog=512)
        fake.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        ready.set()
        await done.wait()
        listening.close()

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    assert ready.wait(120)
    yield fake
    loop, done = stop
    loop.call_soon_threadsafe(done.set)
    thread.join(120)
    assert not thread.is_alive()
