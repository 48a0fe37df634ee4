"""The app: who may call, the infer route, apps of others, and the rest through FastAPI."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Receive, Scope, Send

from fornax.config import ServingError
from fornax.config.http_server import replay
from fornax.serving.access import Auth, Limits
from fornax.serving.http import bodies
from fornax.serving.http.bodies import BodyMemory, ClientLeft, HeldBodies, LateBody
from fornax.serving.http.gate import Gate, path_of
from fornax.serving.http.infer import Inference
from fornax.serving.http.request_ids import request_id_of, with_request_id
from fornax.serving.http.responses import error_response, send_response
from fornax.serving.http.routes import create_routes
from fornax.serving.http.routing import ServerContext
from fornax.serving.v2.shared_memory import SharedMemory

if TYPE_CHECKING:
    from fornax.serving.host import Host

__all__ = ["App", "http_app"]

_SMALL = 2**20
"""Largest body of a call that is not an inference."""
_BODIES = 4
"""How many of the largest bodies are held at once."""


class App:
    """The ASGI app; of one event loop."""

    def __init__(
        self,
        context: ServerContext,
        gate: Gate,
        extra_apps: Mapping[str, ASGIApp],
    ):
        self.routes = create_routes(context)
        """Every call that is not an inference."""
        self._limits = context.limits
        self._memory = BodyMemory(_BODIES * self._limits.max_body_bytes)
        self._infer = Inference(context.host, self._limits, context.shared_memory, context.events)
        self._events = context.events
        self._gate = gate
        self._extra = {prefix.rstrip("/"): app for prefix, app in extra_apps.items()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond to a request."""
        if scope["type"] != "http":
            await self.routes(scope, receive, send)
            return
        send = with_request_id(scope, send)
        with HeldBodies(self._memory) as held:
            try:
                await self._respond(scope, receive, send, held)
            except LateBody as error:
                await send_response(send, error_response(408, str(error)), close=True)
            except ClientLeft:
                pass

    async def _respond(self, scope: Scope, receive: Receive, send: Send, held: HeldBodies) -> None:
        path = path_of(scope)
        names = _inference(path)
        try:
            self._gate.check(path, scope)
        except ServingError as error:
            await bodies.drop(receive, self._limits, held)
            await self._refuse(scope, send, error)
            return
        if names is None:
            try:
                await self._other(path, scope, receive, send, held)
            except ServingError as error:
                await self._refuse(scope, send, error)
        elif scope["method"] == "POST":
            await self._infer(scope, receive, send, held, *names)
        else:
            await bodies.drop(receive, self._limits, held)
            await send_response(send, error_response(405, f"{path} takes only POST"))

    async def _refuse(self, scope: Scope, send: Send, error: ServingError) -> None:
        self._events.tell_refused("http", error.code, str(error), request_id=request_id_of(scope))
        await send_response(send, error_response(error.code.http, str(error)))

    async def _other(
        self, path: str, scope: Scope, receive: Receive, send: Send, held: HeldBodies
    ) -> None:
        app, most = self.routes, min(_SMALL, self._limits.max_body_bytes)
        for prefix, extra in self._extra.items():
            if path == prefix or path.startswith(prefix + "/"):
                app, most = extra, self._limits.max_body_bytes
                break
        body = await bodies.read(receive, self._limits, most, held)
        if app is self.routes and scope["method"] == "HEAD":  # uvicorn leaves the body out
            scope = {**scope, "method": "GET"}
        await app(scope, replay(body, receive), send)


def _inference(path: str) -> list[str] | None:
    """The model, and perhaps the version, that an inference asks for; None: it is no such path."""
    if not path.endswith("/infer") or not path.startswith("/v2/models/"):
        return None
    names = path.split("/")
    if len(names) == 5:
        return names[3:4]
    return names[3:6:2] if len(names) == 7 and names[4] == "versions" else None


def http_app(
    host: "Host",
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
    context = ServerContext(
        host=host,
        limits=limits or Limits(),
        shared_memory=shared_memory or SharedMemory(enabled=False),
        metrics=metrics,
        trace_sample_rate=trace_sample_rate,
        events=host.events,
    )
    return App(context, Gate(auth or Auth(), admin), extra_apps or {})
