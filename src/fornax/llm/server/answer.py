"""A generation's way to its client: outputs in, JSON or server-sent events out."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Protocol

from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from fornax.llm.outputs import RequestOutput
from fornax.llm.server.errors import ApiError, translate
from fornax.llm.server.record import Record
from fornax.llm.server.state import Server

__all__ = ["Answer", "Client", "Shaper"]

_log = logging.getLogger(__name__)
_GONE = 499
_DONE = b"data: [DONE]\n\n"
_START = {
    "type": "http.response.start",
    "status": 200,
    "headers": [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),
    ],
}

Outputs = AsyncIterator[RequestOutput]


class Shaper(Protocol):
    """Turns outputs into an endpoint's answer."""

    def push(self, output: RequestOutput) -> bytes:
        """Take an output; the events it makes, empty when there are none or no stream is wanted."""

    def events(self) -> bytes:
        """The last events of a stream."""

    def whole(self) -> bytes:
        """The answer that is no stream."""


class Client:
    """Cancels the work inside when its client goes away, and swallows that cancellation."""

    def __init__(self, receive: Receive):
        self._receive = receive
        self.gone = False
        self.answered = False
        """Set before the last byte is sent: after it every client goes away."""

    async def __aenter__(self) -> "Client":
        self._work = asyncio.current_task()
        self._watch = asyncio.create_task(self._wait())
        return self

    async def _wait(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not self.answered and self._work is not None:
            self.gone = True
            self._work.cancel()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        self._watch.cancel()
        if not self.gone or self._work is None:
            return False
        others = self._work.uncancel()  # who else asked for it still gets it
        return kind is asyncio.CancelledError and not others


class Answer(Response):
    """Runs one request's generations and sends what they make."""

    def __init__(
        self,
        server: Server,
        record: Record,
        start: Callable[[], Sequence[Outputs]],
        shaper: Shaper,
        *,
        streams: bool,
    ):
        """`start` gives the prompts to the engine; what it raises is answered as JSON."""
        super().__init__()
        self._server = server
        self._record = record
        self._start = start
        self._shaper = shaper
        self._streams = streams
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer; a client that goes away ends the generations at once."""
        server, seconds = self._server, self._server.config.request_timeout
        with server.load.admitted():
            server.require_ready()
            async with Client(receive) as client:
                try:
                    async with asyncio.timeout(seconds or None):
                        # A task of its own: a token wakes it without waking every middleware.
                        work = (self._stream if self._streams else self._collect)(client, send)
                        await asyncio.create_task(work)
                except asyncio.CancelledError:
                    if client.gone or not server.stopping:
                        raise
                    if not self._started:
                        raise _stopped("the server is stopping") from None
                except Exception as error:
                    if not self._started:
                        raise self._told(error) from error
            if client.gone:
                self._record.status = _GONE

    def _told(self, error: Exception) -> ApiError:
        """What the client is told of a failure; what is no fault of its own is logged."""
        if self._server.engine.error() is not None:
            told = ApiError(503, "the engine died; the server is stopping", code="engine_dead")
        else:
            told = translate(error)
        self._record.fields["error"] = told.message
        if told.status_code == 500:
            _log.exception("request %s failed", self._record.id, exc_info=error)
        return told

    async def _collect(self, client: Client, send: Send) -> None:
        async with _merged(self._start()) as outputs:
            async for output in outputs:
                self._shaper.push(output)
        body = self._shaper.whole()
        length = str(len(body)).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", length)]
        self._started = client.answered = True
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})

    async def _stream(self, client: Client, send: Send) -> None:
        """Send events; the first waits for the first output, so that errors have their status."""
        push, direct = self._shaper.push, self._record.send
        try:
            async with _merged(self._start()) as outputs:
                async for output in outputs:
                    events = push(output)
                    if events:
                        if not self._started:
                            self._started = True
                            await send(_START)
                        await direct(
                            {"type": "http.response.body", "body": events, "more_body": True}
                        )
            last = self._shaper.events() + _DONE
        except asyncio.CancelledError:
            if self._started and not client.gone:
                stopping = self._server.stopping
                why = "the server is stopping" if stopping else "it took too long"
                await _last(client, send, _stopped(why))
            raise
        except Exception as error:
            if not self._started:
                raise
            await _last(client, send, self._told(error))
        else:
            if not self._started:
                self._started = True
                await send(_START)
            await _end(client, send, last)


def _stopped(why: str) -> ApiError:
    return ApiError(503, f"the request was stopped: {why}", code="stopped")


async def _last(client: Client, send: Send, error: ApiError) -> None:
    await _end(client, send, b"data: " + to_json(error.body()) + b"\n\n" + _DONE)


async def _end(client: Client, send: Send, events: bytes) -> None:
    client.answered = True
    await send({"type": "http.response.body", "body": events, "more_body": False})


@contextlib.asynccontextmanager
async def _merged(streams: Sequence[Outputs]) -> AsyncIterator[Outputs]:
    """The outputs of all streams as they come; leaving closes, and so aborts, every stream."""
    outputs = streams[0] if len(streams) == 1 else _interleaved(streams)
    try:
        yield outputs
    finally:
        for each in (outputs, *streams):
            await each.aclose()  # pyrefly: ignore[missing-attribute]


async def _interleaved(streams: Sequence[Outputs]) -> Outputs:
    """One stream out of several, each read by a task of its own."""
    arrived: asyncio.Queue[RequestOutput | BaseException | None] = asyncio.Queue()

    async def read(stream: Outputs) -> None:
        try:
            async for output in stream:
                arrived.put_nowait(output)
            arrived.put_nowait(None)
        except Exception as error:
            arrived.put_nowait(error)

    readers = [asyncio.create_task(read(stream)) for stream in streams]
    try:
        ended = 0
        while ended < len(readers):
            item = await arrived.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                ended += 1
            else:
                yield item
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
