"""Answers: JSON, and errors in the V2 protocol's form."""

from typing import Any

import orjson

from fornax.serving.entry import ASGIApp

__all__ = ["Headers", "Reply", "error_reply", "json_reply", "lines_of", "send_reply"]

Headers = list[tuple[bytes, bytes]]
Reply = tuple[int, Headers, bytes]
"""Status, headers beside the length, body."""

JSON: tuple[bytes, bytes] = (b"content-type", b"application/json")
_RETRY = {429: b"1", 503: b"2"}
"""Seconds after which a client does well to ask again, by status."""


def json_reply(document: Any, status: int = 200) -> Reply:
    """Any plain content."""
    return status, [JSON], orjson.dumps(document)


def error_reply(status: int, message: str) -> Reply:
    """`{"error": message}`."""
    headers = [JSON]
    if status in _RETRY:
        headers.append((b"retry-after", _RETRY[status]))
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    # Names in a message come from clients, and may hold what is no Unicode.
    text = message.encode("utf-8", "backslashreplace").decode()
    return status, headers, orjson.dumps({"error": " ".join(text.split())})


def lines_of(headers: Headers) -> bytes:
    """Headers as they go over the wire."""
    return b"".join(b"%b: %b\r\n" % header for header in headers)


async def send_reply(send: Any, reply: Reply, *, close: bool = False) -> None:
    """Send an answer; `close` ends the connection with it."""
    status, headers, body = reply
    headers = [*headers, (b"content-length", b"%d" % len(body))]
    if close:
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def always(status: int, message: str) -> ASGIApp:
    """An app that answers everything so, and ends the connection."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send_reply(send, error_reply(status, message), close=True)

    return app
