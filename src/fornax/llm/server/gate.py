"""What every request passes first: id, key, size of the body, access log, HTTP metrics."""

import asyncio
import hmac
import re
import uuid
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fornax.llm.server.config import ServerConfig
from fornax.llm.server.errors import ApiError
from fornax.llm.server.record import Record, log_access

__all__ = ["Gate"]

_OPEN = frozenset({"/health", "/ready", "/ping", "/metrics"})
_ID = re.compile(rb"[\x21-\x7e]{1,128}")
_GONE = 499


class _ClientLeft(Exception):  # noqa: N818 - no error of ours
    """The client went away while its body was read."""


class Gate:
    """ASGI middleware around the whole app."""

    def __init__(
        self, app: ASGIApp, config: ServerConfig, finished: Callable[[Record], None]
    ) -> None:
        """`finished` is told of every request when it ends."""
        self._app = app
        self._config = config
        self._finished = finished
        self._keys = [key.encode() for key in config.api_key]
        self._quiet = {path.strip() for path in config.disable_access_log_for_endpoints.split(",")}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or answer it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        record = _record(scope, headers, send)
        scope.setdefault("state", {})["record"] = record
        try:
            await self._pass(scope, headers, record, receive, self._sender(record, send))
        except _ClientLeft:
            record.status = _GONE
        except BaseException:
            record.status = record.status or 500
            raise
        finally:
            record.handler = getattr(scope.get("route"), "path", "none")
            self._finished(record)
            if not self._config.disable_access_log and record.path not in self._quiet:
                log_access(record)

    async def _pass(
        self,
        scope: Scope,
        headers: dict[bytes, bytes],
        record: Record,
        receive: Receive,
        send: Send,
    ) -> None:
        try:
            self._check_key(scope, headers)
            body = await self._body(headers, receive)
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        await self._app(scope, _replay(body, receive), send)

    def _sender(self, record: Record, send: Send) -> Send:
        """Send with the request's id among the headers."""
        shown = self._config.enable_request_id_headers
        header = (b"x-request-id", record.id.encode())

        async def sender(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                if shown:
                    # A new message: streams share the one that they start with.
                    message = {**message, "headers": [*message.get("headers", ()), header]}
            await send(message)

        return sender

    def _check_key(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        if not self._keys or _path(scope) in _OPEN or scope["method"] == "OPTIONS":
            return
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        # Every key is compared, so that the time tells nothing.
        fits = [hmac.compare_digest(key.strip(), known) for known in self._keys]
        if scheme.lower() != b"bearer" or not any(fits):
            raise ApiError(
                401,
                "the API key is missing or wrong; send it as Authorization: Bearer KEY",
                code="invalid_api_key",
            )

    async def _body(self, headers: dict[bytes, bytes], receive: Receive) -> bytes:
        """The whole body; 413 when it is too large, 408 when it does not come."""
        most = self._config.max_body_bytes
        declared = headers.get(b"content-length", b"0")
        if declared == b"0" and b"transfer-encoding" not in headers:
            return b""
        parts, size = [], 0
        try:
            async with asyncio.timeout(self._config.body_timeout):
                # A client may read its answer only after it sent everything, within reason.
                while size <= 4 * most:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise _ClientLeft
                    size += len(message.get("body", b""))
                    if size <= most:
                        parts.append(message.get("body", b""))
                    if not message.get("more_body", False):
                        break
        except TimeoutError:
            late = f"the body did not arrive in {self._config.body_timeout:g} s"
            raise _closing(408, late) from None
        if size > most:
            raise _closing(413, f"the body is larger than {most} bytes, which is all it may have")
        return b"".join(parts)


def _closing(status: int, message: str) -> ApiError:
    """An error after which the connection cannot go on, as its body was not read."""
    error = ApiError(status, message)
    error.headers = {"Connection": "close"}
    return error


def _replay(body: bytes, receive: Receive) -> Receive:
    """Receive that has the body, then what else comes."""
    given = False

    async def replayed() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replayed


def _record(scope: Scope, headers: dict[bytes, bytes], send: Send) -> Record:
    brought = headers.get(b"x-request-id", b"")
    name = brought.decode("ascii") if _ID.fullmatch(brought) else uuid.uuid4().hex
    client = scope.get("client")
    return Record(
        id=name,
        method=scope["method"],
        path=_path(scope),
        send=send,
        client=f"{client[0]}:{client[1]}" if client else "",
    )


def _path(scope: Scope) -> str:
    """The path as the routes know it, whatever a proxy shows it under."""
    return scope["path"].removeprefix(scope.get("root_path", ""))
