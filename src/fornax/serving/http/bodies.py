"""Bodies of requests and responses: bounded in size and time, compressed or not."""

import asyncio
import contextlib
import zlib

from starlette.types import Receive

from fornax.config import ServingCode, ServingError
from fornax.serving.access import Limits
from fornax.serving.v2.datatypes import refuse

__all__ = [
    "BodyMemory",
    "ClientLeft",
    "HeldBodies",
    "LateBody",
    "accepted_coding",
    "deflate",
    "drop",
    "inflate",
    "read",
]

_WINDOWS = {b"gzip": 31, b"x-gzip": 31, b"deflate": 15}
"""zlib's `wbits` by content coding."""
_LEVEL = 1
_IN_THREAD = 256 * 1024
"""Bytes from which work on a body leaves the event loop."""


class ClientLeft(Exception):  # noqa: N818 - no error of ours
    """The client went away before its response."""


class LateBody(Exception):  # noqa: N818 - answered by 408, for which the protocol has no code
    """The body did not come in time."""


class BodyMemory:
    """Bytes of large bodies in memory, over all requests; more than `most` are refused.

    Else as many clients as connections are allowed could each fill the largest body.
    """

    def __init__(self, most: int):
        self.left = most


class HeldBodies:
    """What one request holds of the `BodyMemory`, for as long as this context lasts."""

    __slots__ = ("_held", "_memory")

    def __init__(self, memory: BodyMemory):
        self._memory = memory
        self._held = 0

    def take(self, size: int) -> None:
        """Hold this many bytes more; ServingError where there is no room."""
        if size > self._memory.left:
            raise ServingError(
                ServingCode.RESOURCE_EXHAUSTED,
                "the bodies of other requests fill what memory there is for them; send this one "
                "again later",
            )
        self._memory.left -= size
        self._held += size

    def __enter__(self) -> "HeldBodies":
        return self

    def __exit__(self, *_: object) -> None:
        self._memory.left += self._held


async def read(receive: Receive, limits: Limits, most: int, held: HeldBodies) -> bytes:
    """The whole body.

    One that is refused is read to its end and dropped: a client that sends everything first could
    not read the refusal, and what follows would be taken for the next request.

    Raises ServingError when it is larger than `most` bytes or than there is room for; LateBody, or
    ClientLeft.
    """
    parts: list[bytes] = []
    size, refusal = 0, None
    try:
        async with asyncio.timeout(limits.body_timeout):
            while True:
                message = await receive()
                if message["type"] != "http.request":
                    raise ClientLeft
                body, more = message.get("body", b""), message.get("more_body", False)
                size += len(body)
                if refusal is None:
                    refusal = _refusal(size, most, len(body), held)
                if refusal is None:
                    parts.append(body)
                else:
                    parts.clear()
                if not more:
                    break
    except TimeoutError:
        raise LateBody(f"the body did not arrive in {limits.body_timeout:g} s") from None
    if refusal is not None:
        raise refusal
    return parts[0] if len(parts) == 1 else b"".join(parts)


async def drop(receive: Receive, limits: Limits, held: HeldBodies) -> None:
    """Read a body that is not used, to its end. Raises LateBody, or ClientLeft."""
    with contextlib.suppress(ServingError):
        await read(receive, limits, 0, held)


def _refusal(size: int, most: int, part: int, held: HeldBodies) -> ServingError | None:
    if size > most:
        return _too_large(most)
    try:
        held.take(part)
    except ServingError as error:
        return error
    return None


def _too_large(most: int) -> ServingError:
    return ServingError(
        ServingCode.TOO_LARGE, f"the body is larger than {most} bytes, which is all it may have"
    )


async def inflate(body: bytes, coding: bytes, most: int) -> bytes:
    """The body without its content coding; ServingError for one over `most` bytes, or not valid."""
    if coding == b"identity":
        return body
    window = _WINDOWS.get(coding.strip().lower())
    if window is None:
        shown = coding.decode("latin-1")[:40]
        raise refuse(f"content-encoding {shown!r} is not read; send gzip, deflate or neither")
    if len(body) < _IN_THREAD // 8:
        return _inflate(body, window, most)
    return await asyncio.to_thread(_inflate, body, window, most)


def _inflate(body: bytes, window: int, most: int) -> bytes:
    parts, size = [], 0
    try:
        while body:  # gzip may have several members
            member = zlib.decompressobj(window)
            part = member.decompress(body, most - size + 1)
            size += len(part)
            if size > most:
                raise _too_large(most)
            if not member.eof:
                raise refuse("the compressed body is cut off")
            parts.append(part)
            body = member.unused_data
            if body and window != _WINDOWS[b"gzip"]:
                raise refuse("bytes follow the compressed body")
    except zlib.error:
        raise refuse("the compressed body is not valid in its content-encoding") from None
    return b"".join(parts)


def accepted_coding(header: bytes) -> bytes:
    """The coding that a client asks for by naming it alone; empty: none.

    Most clients offer several on every request: for tensors, which hardly shrink, that is not a
    preference.
    """
    coding = header.partition(b";")[0].strip().lower()
    return coding if coding in (b"gzip", b"deflate") else b""


async def deflate(body: bytes, coding: bytes) -> bytes:
    """The body in gzip or deflate."""
    if len(body) < _IN_THREAD:
        return _deflate(body, coding)
    return await asyncio.to_thread(_deflate, body, coding)


def _deflate(body: bytes, coding: bytes) -> bytes:
    packer = zlib.compressobj(_LEVEL, zlib.DEFLATED, _WINDOWS[coding])
    return packer.compress(body) + packer.flush()
