"""The app: who may call, the infer route, apps of others, and the rest through FastAPI."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from fornax.config import ServingCode, ServingError
from fornax.serving.access import Auth, Limits
from fornax.serving.entry import ASGIApp
from fornax.serving.http import bodies
from fornax.serving.http.bodies import ClientLeft, Held, LateBody
from fornax.serving.http.direct import Call
from fornax.serving.http.infer import Inference
from fornax.serving.http.parts import Parts
from fornax.serving.http.replies import error_reply, send_reply
from fornax.serving.http.routes import create_routes
from fornax.serving.v2.shared_memory import SharedMemory

__all__ = ["App", "http_app"]

_SMALL = 2**20
"""Largest body of a call that is no inference."""
_BODIES = 4
"""How many of the largest bodies are held at once."""
_OPEN = re.compile(r"/v2/health/(live|ready)|/v2/models/[^/]+(/versions/[^/]+)?/ready")
"""What needs no token."""
_ADMIN = (
    "/v2/repository/models/",
    "/v2/systemsharedmemory/",
    "/v2/cudasharedmemory/",
    "/v2/profile",
)
_ADMIN_WRITES = ("/v2/logging", "/v2/trace/setting")


class App:
    """The ASGI app; of one event loop."""

    def __init__(
        self,
        parts: Parts,
        limits: Limits,
        auth: Auth,
        admin: Auth | None,
        extra_apps: Mapping[str, ASGIApp],
    ):
        self.routes = create_routes(parts)
        """Every call that is no inference."""
        self._held = Held(_BODIES * limits.max_body_bytes)
        self._infer = Inference(parts.host, limits, parts.shared_memory, parts.events, self._held)
        self._events = parts.events
        self._limits = limits
        self._auth = auth
        self._admin = admin
        self._extra = {prefix.rstrip("/"): app for prefix, app in extra_apps.items()}
        self._closed = auth.enabled or admin is not None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self.routes(scope, receive, send)
            return
        path = _path(scope)
        try:
            if self._closed:
                self._check(path, scope)
            names = _inference(path)
            if names is not None:
                if scope["method"] == "POST":
                    await self._infer(scope, receive, send, *names)
                else:
                    await send_reply(send, error_reply(405, f"{path} takes POST alone"))
                return
            await self._other(path, scope, receive, send)
        except ServingError as error:
            if self._events is not None:
                self._events.tell_refused("http", error.code, str(error))
            await send_reply(send, error_reply(error.code.http, str(error)))
        except LateBody as error:
            await send_reply(send, error_reply(408, str(error)), close=True)
        except ClientLeft:
            pass
        finally:
            if "fornax.held" in scope:
                self._held.release(scope)

    def quick(self, scope: Any) -> Call | None:
        """What answers inferences with this scope's head without a task; None: no such one is."""
        path = _path(scope)
        names = _inference(path)
        if names is None or scope["method"] != "POST":
            return None
        if self._closed:
            try:
                self._check(path, scope)
            except ServingError:
                return None
        return self._infer.quick(scope, *names)

    def _check(self, path: str, scope: Any) -> None:
        """Raise ServingError unless the request's token opens `path`."""
        if _OPEN.fullmatch(path):
            return
        if path == "/metrics" and self._auth.open_metrics:
            return
        header = None
        for name, value in scope["headers"]:
            if name == b"authorization":
                header = value
        if not self._auth.admits(header):
            raise ServingError(
                ServingCode.UNAUTHENTICATED,
                "the token is missing or wrong; send it as Authorization: Bearer TOKEN",
            )
        admin = self._admin
        if admin and _changes(path, scope["method"]) and not admin.admits(header):
            raise ServingError(
                ServingCode.PERMISSION_DENIED, f"{path} is open to the admin token alone"
            )

    async def _other(self, path: str, scope: Any, receive: Any, send: Any) -> None:
        app, most = self.routes, min(_SMALL, self._limits.max_body_bytes)
        for prefix, extra in self._extra.items():
            if path == prefix or path.startswith(prefix + "/"):
                app, most = extra, self._limits.max_body_bytes
                break
        body = await bodies.read(receive, scope, self._limits, most, self._held)
        if app is self.routes and scope["method"] == "HEAD":  # uvicorn leaves the body out
            scope = {**scope, "method": "GET"}
        await app(scope, _replay(body, receive), send)


def _path(scope: Any) -> str:
    """The path as the routes know it, whatever a proxy shows it under."""
    path: str = scope["path"]
    return path.removeprefix(scope["root_path"]) if scope["root_path"] else path


def _inference(path: str) -> list[str] | None:
    """The model, and perhaps the version, that an inference asks for; None: it is no such path."""
    if not path.endswith("/infer") or not path.startswith("/v2/models/"):
        return None
    names = path.split("/")
    if len(names) == 5:
        return names[3:4]
    return names[3:6:2] if len(names) == 7 and names[4] == "versions" else None


def _changes(path: str, method: str) -> bool:
    """Whether a call is the administrator's."""
    if path.startswith(_ADMIN):
        return True
    return method == "POST" and (path in _ADMIN_WRITES or path.endswith("/trace/setting"))


def _replay(body: bytes, receive: Any) -> Callable[[], Any]:
    """Receive that has the body, then what else comes."""
    given = False

    async def replayed() -> Any:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replayed


def http_app(
    host: Any,
    *,
    limits: Limits | None = None,
    auth: Auth | None = None,
    admin: Auth | None = None,
    extra_apps: Mapping[str, ASGIApp] | None = None,
    shared_memory: SharedMemory | None = None,
    metrics: Callable[[], tuple[bytes, str]] | None = None,
    trace_sample_rate: float = 0.0,
) -> App:
    """The V2 protocol over HTTP, for `host`.

    Args:
      host: what answers: a `Host`.
      limits: sizes and times.
      auth: tokens of which callers must present one; health and readiness need none.
      admin: tokens for what changes the server or tells of others' memory; None: as all else.
      extra_apps: apps by the path they answer under, inside the same limits and tokens.
      shared_memory: what clients register; None: nothing can be.
      metrics: the body and content type of /metrics; None: there is none.
      trace_sample_rate: share of requests that is traced, for clients that ask.
    """
    parts = Parts(
        host=host,
        shared_memory=shared_memory or SharedMemory(enabled=False),
        metrics=metrics,
        trace_sample_rate=trace_sample_rate,
        events=getattr(host, "events", None),
    )
    return App(parts, limits or Limits(), auth or Auth(), admin, extra_apps or {})
