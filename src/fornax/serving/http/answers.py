"""Answers of inferences on their way to the client: packed, and in one write where that works."""

from typing import Any

from fornax.serving.failures import as_serving_error
from fornax.serving.http import bodies
from fornax.serving.http.heads import Head
from fornax.serving.http.replies import JSON, Headers, Reply, error_reply, lines_of
from fornax.serving.v2.datatypes import Raw

__all__ = ["failure", "pack", "reply_of", "send_packed", "send_whole"]

_BINARY = (b"content-type", b"application/octet-stream")


def reply_of(error: Exception) -> Reply:
    """The answer that tells of an error."""
    known = as_serving_error(error)
    return error_reply(known.code.http, str(known))


def failure(error: Exception) -> tuple[int, Headers, list[Raw]]:
    """The same as status, all headers, and body."""
    status, headers, body = reply_of(error)
    return status, [*headers, (b"content-length", b"%d" % len(body))], [body]


def pack(head: Head, text: bytes, binary: list[Raw]) -> tuple[Headers, list[Raw]]:
    """Headers and body of an answer that is not compressed."""
    headers: Headers
    if binary:
        headers = [_BINARY, (b"inference-header-content-length", b"%d" % len(text))]
    else:
        headers = [JSON]
    if head.id:
        headers.append((b"x-request-id", head.id.encode()))
    body: list[Raw] = [text, *binary]
    headers.append((b"content-length", b"%d" % sum(map(len, body))))
    return headers, body


async def send_packed(
    send: Any, connection: Any, head: Head, text: bytes, binary: list[Raw]
) -> None:
    """Send an answer, compressed if that was asked for."""
    headers, body = pack(head, text, binary)
    if head.accepted:
        packed = await bodies.deflate(b"".join(body), head.accepted)
        headers[-1] = (b"content-length", b"%d" % len(packed))
        headers.append((b"content-encoding", head.accepted))
        body = list[Raw]([packed])
    cycle = getattr(send, "__self__", None)
    if (
        cycle is None
        or not connection
        or not connection.answer(cycle, 200, lines_of(headers), body)
    ):
        await send_whole(send, 200, headers, body)


async def send_whole(send: Any, status: int, headers: Headers, body: list[Raw]) -> None:
    """Send an answer as any application does."""
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": b"".join(body)})
