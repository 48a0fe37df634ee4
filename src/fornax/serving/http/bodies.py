"""Bodies of requests and answers: bounded in size and time, compressed or not."""

import asyncio
import zlib
from typing import Any

from fornax.config import ServingCode, ServingError
from fornax.serving.access import Limits
from fornax.serving.v2.datatypes import refuse

__all__ = [
    "ClientLeft",
    "Held",
    "LateBody",
    "accepted_coding",
    "deflate",
    "inflate",
    "read",
    "too_large",
]

_WINDOWS = {b"gzip": 31, b"x-gzip": 31, b"deflate": 15}
"""zlib's `wbits` by content coding."""
_LEVEL = 1
_IN_THREAD = 256 * 1024
"""Bytes from which work on a body leaves the event loop."""


class ClientLeft(Exception):  # noqa: N818 - no error of ours
    """The client went away before its body was here."""


class LateBody(Exception):  # noqa: N818 - answered by 408, for which the protocol has no code
    """The body did not come in time."""


class Held:
    """Bytes of large bodies in memory, over all requests; more than `most` are refused.

    Else as many clients as connections are allowed could each fill the largest body.
    """

    def __init__(self, most: int):
        self._left = most

    def take(self, scope: Any, size: int) -> None:
        """Hold more for a request; ServingError where there is no room."""
        if size > self._left:
            raise ServingError(
                ServingCode.RESOURCE_EXHAUSTED,
                "the bodies of other requests fill what memory there is for them; send this one "
                "again later",
            )
        self._left -= size
        scope["fornax.held"] = scope.get("fornax.held", 0) + size

    def release(self, scope: Any) -> None:
        """The request is over."""
        self._left += scope.pop("fornax.held", 0)


async def read(receive: Any, scope: Any, limits: Limits, most: int, held: Held) -> bytes:
    """The whole body.

    Raises ServingError when it is larger than `most` bytes: what still comes is left to the
    connection, which drops it. Raises LateBody, or ClientLeft.
    """
    connection = scope.get("fornax.connection")
    if connection is not None and not connection.in_message:  # all is here
        message = await receive()
        if message["type"] != "http.request":
            raise ClientLeft
        body = message["body"]
        if len(body) > most:
            raise too_large(most)
        return body
    parts, size = [], 0
    try:
        async with asyncio.timeout(limits.body_timeout):
            while True:
                message = await receive()
                if message["type"] != "http.request":
                    raise ClientLeft
                body = message.get("body", b"")
                size += len(body)
                if size > most:
                    raise too_large(most)
                held.take(scope, len(body))
                parts.append(body)
                if not message.get("more_body", False):
                    return b"".join(parts)
    except TimeoutError:
        raise LateBody(f"the body did not arrive in {limits.body_timeout:g} s") from None


def too_large(most: int) -> ServingError:
    """The error of a body over the limit."""
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
                raise too_large(most)
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

    Most clients offer several on every request: for tensors, which hardly shrink, that is no wish.
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
