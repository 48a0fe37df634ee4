"""Runs a request's generations and sends what they make, as JSON or as server-sent events."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Generic, Protocol, TypeVar

from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from fornax.llm.server.config import HttpConfig
from fornax.llm.server.errors import CLIENT_CLOSED_REQUEST, ApiError, translate
from fornax.llm.server.listening import Served
from fornax.llm.server.middleware import RequestContext

__all__ = ["CancelOnDisconnect", "GenerationResponse"]


_log = logging.getLogger(__name__)
_DONE = b"data: [DONE]\n\n"
_EVENT_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)

Output = TypeVar("Output")
In = TypeVar("In", contravariant=True)


class _Builder(Protocol[In]):
    """Makes the answer out of what the engine makes."""

    def push(self, output: In) -> bytes:
        """Take an output; the events that it makes, empty where there are none."""

    def stream_end(self) -> bytes:
        """The last events of a stream."""

    def body(self) -> bytes:
        """The answer that is not a stream."""


class _Server(Served, Protocol):
    """What the answer asks of the server."""

    @property
    def config(self) -> HttpConfig:
        """How it serves."""

    def require_ready(self) -> None:
        """ApiError unless requests are taken."""


class CancelOnDisconnect:
    """Cancels the work inside when its client goes away, and swallows that cancellation."""

    def __init__(self, receive: Receive):
        self._receive = receive
        self.disconnected = False
        self.answered = False
        """Set before the last byte is sent: after it every client goes away."""

    async def __aenter__(self) -> "CancelOnDisconnect":
        self._work = asyncio.current_task()
        self._watch = asyncio.create_task(self._wait())
        return self

    async def _wait(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not self.answered and self._work is not None:
            self.disconnected = True
            self._work.cancel()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        self._watch.cancel()
        if not self.disconnected or self._work is None:
            return False
        others = self._work.uncancel()  # who else asked for it still gets it
        return kind is asyncio.CancelledError and not others


class GenerationResponse(Response, Generic[Output]):
    """Runs one request's generations and sends what they make."""

    def __init__(
        self,
        server: _Server,
        context: RequestContext,
        start: Callable[[], Sequence[AsyncIterator[Output]]],
        builder: _Builder[Output],
        *,
        streams: bool,
    ):
        """`start` gives the prompts to the engine; what it raises is answered as JSON."""
        super().__init__()
        self._server = server
        self._context = context
        self._start = start
        self._builder = builder
        self._streams = streams
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer; a client that goes away ends the generations at once."""
        server, seconds = self._server, self._server.config.request_timeout
        with server.concurrency.admitted():
            server.require_ready()
            async with CancelOnDisconnect(receive) as client:
                try:
                    async with asyncio.timeout(seconds or None):
                        # A task of its own: a token wakes it without waking every middleware.
                        work = (self._stream if self._streams else self._collect)(client, send)
                        await asyncio.create_task(work)
                except asyncio.CancelledError:
                    if client.disconnected or not server.stopping:
                        raise
                    if not self._started:
                        raise _stopped("the server is stopping") from None
                except Exception as error:
                    if not self._started:
                        raise self._as_api_error(error) from error
            if client.disconnected:
                self._context.status = CLIENT_CLOSED_REQUEST

    def _as_api_error(self, error: Exception) -> ApiError:
        """What the client is failure of a failure; what is not a fault of its own is logged."""
        if self._server.error() is not None:
            failure = ApiError(503, "the engine died; the server is stopping", code="engine_dead")
        else:
            failure = translate(error)
        self._context.log_fields["error"] = failure.message
        if failure.status_code == 500:
            _log.exception("request %s failed", self._context.id, exc_info=error)
        return failure

    async def _collect(self, client: CancelOnDisconnect, send: Send) -> None:
        async with _merged(self._start()) as outputs:
            async for output in outputs:
                self._builder.push(output)
        body = self._builder.body()
        length = str(len(body)).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", length)]
        self._started = client.answered = True
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})

    async def _stream(self, client: CancelOnDisconnect, send: Send) -> None:
        """Send events; the first waits for the first output, so that errors have their status."""
        push, direct = self._builder.push, self._context.send
        try:
            async with _merged(self._start()) as outputs:
                async for output in outputs:
                    events = push(output)
                    if events:
                        if not self._started:
                            self._started = True
                            await send(_stream_start())
                        await direct(
                            {"type": "http.response.body", "body": events, "more_body": True}
                        )
            last = self._builder.stream_end() + _DONE
        except asyncio.CancelledError:
            if self._started and not client.disconnected:
                stopping = self._server.stopping
                why = "the server is stopping" if stopping else "it took too long"
                await _send_error(client, send, _stopped(why))
            raise
        except Exception as error:
            if not self._started:
                raise
            await _send_error(client, send, self._as_api_error(error))
        else:
            if not self._started:
                self._started = True
                await send(_stream_start())
            await _send_last(client, send, last)


def _stream_start() -> Message:
    """The head of a stream; its own, since middlewares add headers in place."""
    return {"type": "http.response.start", "status": 200, "headers": list(_EVENT_HEADERS)}


def _stopped(why: str) -> ApiError:
    return ApiError(503, f"the request was stopped: {why}", code="stopped")


async def _send_error(client: CancelOnDisconnect, send: Send, error: ApiError) -> None:
    await _send_last(client, send, b"data: " + to_json(error.body()) + b"\n\n" + _DONE)


async def _send_last(client: CancelOnDisconnect, send: Send, events: bytes) -> None:
    client.answered = True
    await send({"type": "http.response.body", "body": events, "more_body": False})


@contextlib.asynccontextmanager
async def _merged(
    streams: Sequence[AsyncIterator[Output]],
) -> AsyncIterator[AsyncIterator[Output]]:
    """The outputs of all streams as they come; leaving closes, and so aborts, every stream."""
    outputs = streams[0] if len(streams) == 1 else _interleaved(streams)
    try:
        yield outputs
    finally:
        for each in (outputs, *streams):
            await each.aclose()  # pyrefly: ignore[missing-attribute]


async def _interleaved(streams: Sequence[AsyncIterator[Output]]) -> AsyncIterator[Output]:
    """One stream out of several, each read by a task of its own."""
    arrived: asyncio.Queue[Output | BaseException | None] = asyncio.Queue()

    async def read(stream: AsyncIterator[Output]) -> None:
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
