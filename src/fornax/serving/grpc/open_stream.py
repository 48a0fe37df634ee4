"""Streams of requests that clients have open: read in a task of their own, closed when the server
stops, written to within the send timeout."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator

from fornax.config.errors import ServingCode, ServingError
from fornax.serving.grpc.methods import Context

__all__ = ["IN_FLIGHT", "OpenStream", "OpenStreams"]

IN_FLIGHT = 256
"""Requests of one stream that are read and not answered, at most."""


class OpenStreams:
    """The streams of a server."""

    def __init__(self, send_timeout: float):
        """`send_timeout`: seconds that a client may take to read an answer."""
        self._send_timeout = send_timeout
        self._open: set[OpenStream] = set()
        self._closing = False

    @contextlib.contextmanager
    def opened(self, context: Context) -> Iterator["OpenStream"]:
        """A client's stream, while it is open."""
        stream = OpenStream(context, self._send_timeout)
        if self._closing:
            stream.close()
        self._open.add(stream)
        try:
            yield stream
        finally:
            self._open.discard(stream)

    def close(self) -> None:
        """Read no more requests; what was read is answered, then each stream ends."""
        self._closing = True
        for stream in self._open:
            stream.close()


class OpenStream:
    """One client's stream."""

    def __init__(self, context: Context, send_timeout: float):
        self.context = context
        self._send_timeout = send_timeout
        self._reader: asyncio.Task[None] | None = None
        self._closed = False

    def close(self) -> None:
        """Read no more."""
        self._closed = True
        if self._reader is not None:
            self._reader.cancel()

    @property
    def is_read(self) -> bool:
        """Whether more requests may come."""
        return self._reader is not None and not self._reader.done()

    @contextlib.asynccontextmanager
    async def reading(
        self, read: Coroutine[None, None, None], ended: Callable[[], None]
    ) -> AsyncIterator[None]:
        """Run `read`, which takes the requests, in a task; `ended` is called behind the last one.

        Raises:
          ServingError: at the end of the block, when the stream was closed meanwhile.
        """
        reader = self._reader = asyncio.create_task(read)
        reader.add_done_callback(lambda _: ended())
        if self._closed:
            reader.cancel()
        try:
            yield
            with contextlib.suppress(asyncio.CancelledError):
                await reader
        finally:
            reader.cancel()
        if self._closed:
            raise ServingError(
                ServingCode.UNAVAILABLE,
                "the server is stopping; what was sent on this stream is answered, send the rest "
                "to another server",
            )

    async def write(self, data: bytes) -> None:
        """Send an answer.

        Raises:
          ServingError: the client reads none.
        """
        try:
            async with asyncio.timeout(self._send_timeout):
                await self.context.write(data)
        except TimeoutError:
            raise ServingError(
                ServingCode.DEADLINE_EXCEEDED,
                f"an answer waited {self._send_timeout:g} s to be read; read answers as they come",
            ) from None
