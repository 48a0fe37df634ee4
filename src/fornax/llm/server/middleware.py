"""What every request passes first: id, API key, size of the body, access log, HTTP metrics."""

import asyncio
import hmac
import json
import logging
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fornax.config.http_server import replay
from fornax.config.request_id import HEADER, request_id
from fornax.llm.server.config import HttpConfig
from fornax.llm.server.errors import CLIENT_CLOSED_REQUEST, ApiError
from fornax.llm.server.limits import RefusalPace
from fornax.llm.stats import RequestStats

__all__ = ["RequestContext", "RequestMiddleware", "configure_logging"]

_access_log = logging.getLogger("fornax.llm.access")
_WITHOUT_KEY = frozenset({"/health", "/ready", "/ping", "/metrics"})
_ID_HEADER = HEADER.encode()


@dataclass(slots=True)
class RequestContext:
    """One HTTP request, as the access log and the metrics have it."""

    id: str
    method: str
    path: str
    client: str
    send: Send
    """The connection's own send, without the middleware's."""
    started: float = field(default_factory=time.monotonic)
    status: int = 0
    """499 when the client disconnected first."""
    handler: str = "none"
    """The route's path, as the metrics name it."""
    log_fields: dict[str, object] = field(default_factory=dict)
    """What the routes add to the access log."""
    traceparent: bytes | None = None
    """The caller's W3C trace context."""
    generations: dict[str, RequestStats | None] = field(default_factory=dict)
    """What it asked the engine for, by the engine's id, where it may be traced; None: it runs."""

    @classmethod
    def of(cls, scope: Scope, headers: dict[bytes, bytes], send: Send) -> "RequestContext":
        """The context of a request."""
        client = scope.get("client")
        return cls(
            id=request_id(headers.get(_ID_HEADER)),
            method=scope["method"],
            path=scope["path"].removeprefix(scope.get("root_path", "")),
            send=send,
            client=f"{client[0]}:{client[1]}" if client else "",
            traceparent=headers.get(b"traceparent"),
        )

    def log(self) -> None:
        """Write a line of JSON to the access log."""
        entry = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "id": self.id,
            "client": self.client,
            "method": self.method,
            "path": self.path,
            "status": self.status,
            "seconds": round(time.monotonic() - self.started, 4),
            **{name: value for name, value in self.log_fields.items() if value is not None},
        }
        _access_log.info("%s", json.dumps(entry, ensure_ascii=False, separators=(",", ":")))


def configure_logging() -> None:
    """Access log to standard output as it is, everything else to standard error with its level."""
    plain = logging.StreamHandler(sys.stdout)
    plain.setFormatter(logging.Formatter("%(message)s"))
    others = logging.StreamHandler(sys.stderr)
    others.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    for name, handler in ((_access_log.name, plain), ("fornax", others), ("uvicorn", others)):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.propagate = False
        logger.setLevel(logging.INFO)


class RequestMiddleware:
    """ASGI middleware around the whole app."""

    def __init__(
        self, app: ASGIApp, config: HttpConfig, finished: Callable[[RequestContext], None]
    ) -> None:
        """`finished` is called with every request when it ends."""
        self._app = app
        self._config = config
        self._finished = finished
        self._refusals = RefusalPace()
        self._keys = [key.encode() for key in config.api_key]
        self._quiet = {path.strip() for path in config.disable_access_log_for_endpoints.split(",")}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        context = RequestContext.of(scope, headers, send)
        scope.setdefault("state", {})["context"] = context
        try:
            await self._answer(scope, headers, context, receive)
        except ClientDisconnect:
            context.status = CLIENT_CLOSED_REQUEST
        except BaseException:
            context.status = context.status or 500
            raise
        finally:
            context.handler = getattr(scope.get("route"), "path", "none")
            self._finished(context)
            if not self._config.disable_access_log and context.path not in self._quiet:
                context.log()

    async def _answer(
        self, scope: Scope, headers: dict[bytes, bytes], context: RequestContext, receive: Receive
    ) -> None:
        send = self._sender(context)
        try:
            self._check_key(context, headers)
            body = await self._body(headers, receive)
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        await self._app(scope, replay(body, receive), send)

    def _sender(self, context: RequestContext) -> Send:
        """Send with the request's id among the headers; notes the status, spaces out refusals."""
        shown = self._config.enable_request_id_headers
        header = (_ID_HEADER, context.id.encode())

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                context.status = message["status"]
                if 400 <= context.status < 500:
                    await self._refusals.wait()
                if shown:
                    message = {**message, "headers": [*message.get("headers", ()), header]}
            await context.send(message)

        return send

    def _check_key(self, context: RequestContext, headers: dict[bytes, bytes]) -> None:
        if not self._keys or context.path in _WITHOUT_KEY or context.method == "OPTIONS":
            return
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        # Every key is compared, so that the time says nothing of any.
        matches = [hmac.compare_digest(key.strip(), known) for known in self._keys]
        if scheme.lower() != b"bearer" or not any(matches):
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
                        raise ClientDisconnect
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
    """An error after which the connection cannot continue, as its body was not read."""
    error = ApiError(status, message)
    error.headers = {"Connection": "close"}
    return error
