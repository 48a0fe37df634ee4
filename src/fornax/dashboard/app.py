"""The server: addresses to answers, over HTTP."""

import asyncio
import hashlib
import math
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import anyio.to_thread
from fastapi import FastAPI, HTTPException, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import RedirectResponse, Response, StreamingResponse
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException as StarletteHTTPException

from fornax.config import run_requests
from fornax.config.errors import ConfigError
from fornax.config.http_server import (
    HttpServer,
    listen,
    raise_file_limit,
    server_config,
    shown_address,
)
from fornax.dashboard import views
from fornax.dashboard.answers import Answers, NotFoundError, RefusedError
from fornax.dashboard.encoding import encode
from fornax.dashboard.exporting import export_page
from fornax.dashboard.folder import Folder
from fornax.dashboard.guard import FILE_POLICY, Guard, Tickets, error_body, shell_policy
from fornax.dashboard.live import Watcher, watch_events
from fornax.dashboard.profile_pages import ProfilePages
from fornax.dashboard.shell import document, script_hashes, static_file
from fornax.dashboard.store import RunStore
from fornax.serving.access import Auth, Limits

__all__ = ["create_app", "serve"]

_LIMITS = Limits(max_connections=512, max_header_bytes=256 << 10)
_KEEP_ALIVE = 75.0
_THREADS = 8
"""In which answers are made at once."""
_MOST_FOLLOWED = 1000
_MOST_FILE = 256 << 20
_DEFAULT_LIMITS = {"samples": 50, "images": 100, "events": 500}

Names = Annotated[list[str], Query(default_factory=list)]


def create_app(
    store: RunStore, pages: ProfilePages, auth: Auth, *, control: bool
) -> tuple[Guard, Watcher]:
    """The app, and what its streams wait for, which is to be closed before the server stops.

    Args:
      store: of the runs.
      pages: of captures.
      auth: whose token is asked for; without one nobody's is.
      control: whether runs may be asked for something.
    """
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    answers, watcher, tickets = Answers(store), Watcher(store), Tickets()
    _add_errors(app)
    _add_page(app, answers, pages, tickets)
    _add_api(app, answers, pages, tickets, control=control, token=auth.enabled)
    _add_live(app, answers, watcher)
    return Guard(app, auth, tickets), watcher


def _json(body: bytes | object, status: int = 200, **headers: str) -> Response:
    content = body if isinstance(body, bytes) else encode(body)
    return Response(content, status, headers, media_type="application/json")


def _add_errors(app: FastAPI) -> None:
    def refused(status: int, message: str) -> Response:
        return _json(error_body(status, message), status)

    @app.exception_handler(NotFoundError)
    async def not_found(_: Request, error: Exception) -> Response:
        return refused(404, str(error))

    @app.exception_handler(RefusedError)
    async def senseless(_: Request, error: Exception) -> Response:
        return refused(400, str(error))

    @app.exception_handler(ConfigError)
    async def impossible(_: Request, error: Exception) -> Response:
        return refused(400, str(error))

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"][1:])
        return refused(400, f"{where}: {first['msg']}")

    @app.exception_handler(StarletteHTTPException)
    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, StarletteHTTPException)
        message = error.detail
        if error.status_code == 404 and message == "Not Found":
            message = f"there is nothing at {request.url.path[:200]!r}"
        response = refused(error.status_code, message)
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(Exception)
    async def bug(request: Request, error: Exception) -> Response:
        return refused(500, f"{type(error).__name__}: a bug in fornax ui; its terminal says more")


def _add_page(app: FastAPI, answers: Answers, pages: ProfilePages, tickets: Tickets) -> None:
    @app.get("/")
    def page() -> Response:
        html = document()
        policy = {"content-security-policy": shell_policy(script_hashes(html))}
        return Response(html, headers=policy, media_type="text/html")

    @app.get("/static/{path:path}")
    def static(path: str) -> Response:
        found = static_file(path)
        if found is None:
            raise NotFoundError(f"there is no {path[:200]!r}")
        file, kind = found
        return Response(
            file.read_bytes(), headers={"content-type": kind, "cache-control": "no-cache"}
        )

    @app.get("/files")
    def file(run: str, path: str, token: str | None = None) -> Response:
        found, folder = answers.run(run), answers.store.folder
        real, top = folder.resolve(found.path / path), folder.resolve(found.path)
        kind = (real or "").rpartition(".")[2].lower()
        html = f".{kind}" in views.PAGES
        inside = real is not None and top is not None and real.startswith(top + "/")
        if not inside or not (html or kind in views.PICTURE_TYPES):
            raise NotFoundError(f"the run has no page or picture {path[:200]!r}")
        if html and token is not None:
            return RedirectResponse(tickets.address("/files", run=run, path=path), 303)
        try:
            content = folder.read(found.path / path, _MOST_FILE)
        except OSError as error:
            raise NotFoundError(f"{path[:200]!r} is not there any more") from error
        if html:
            policy = {"content-security-policy": FILE_POLICY}
            return Response(content, headers=policy, media_type="text/html; charset=utf-8")
        return Response(content, media_type=views.PICTURE_TYPES[kind])

    @app.get("/page")
    def made(request: Request, key: str) -> Response:
        # Only under the address that this server gave: other folders' pages are there too.
        if not tickets.admit("/page", request.scope["query_string"]):
            raise NotFoundError("this page was not made by this server; open its capture again")
        try:
            content = pages.read(key)
        except OSError as error:
            raise NotFoundError("the page is not kept any more; open its capture again") from error
        policy = {"content-security-policy": FILE_POLICY}
        return Response(content, headers=policy, media_type="text/html; charset=utf-8")

    @app.get("/export")
    def export(run: Names) -> Response:
        html = export_page(answers, run)
        name = f"{run[0].rpartition('/')[2]}.html" if len(run) == 1 else "runs.html"
        plain = "".join(c if c.isascii() and (c.isalnum() or c in "-_.") else "_" for c in name)
        headers = {
            "content-disposition": f'attachment; filename="{plain}"',
            "content-security-policy": FILE_POLICY,
        }
        return Response(html.encode("utf-8", "replace"), headers=headers, media_type="text/html")


def _add_api(
    app: FastAPI,
    answers: Answers,
    pages: ProfilePages,
    tickets: Tickets,
    *,
    control: bool,
    token: bool,
) -> None:
    @app.get("/api/about")
    def about() -> Response:
        return _json(answers.about(control=control, token=token))

    @app.get("/api/runs")
    def runs(request: Request) -> Response:
        found = answers.runs()
        # Not of the disk, whose free bytes always change.
        lines = encode([found["runs"], found["truncated"]])
        tag = f'"{hashlib.blake2b(lines, digest_size=12).hexdigest()}"'
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers={"etag": tag})
        return _json(found, etag=tag)

    @app.get("/api/runs/{path:path}")
    def part(
        path: str,
        step: int | None = None,
        prompt: str | None = None,
        search: str = "",
        order: str = "drawn",
        offset: Annotated[int, Query(ge=0, le=10_000_000)] = 0,
        limit: Annotated[int | None, Query(ge=1, le=1000)] = None,
    ) -> Response:
        most = limit or _DEFAULT_LIMITS.get(path.rpartition("/")[2], 100)
        query = {"step": step, "prompt": prompt, "search": search, "order": order}
        return _json(answers.part(path, {**query, "offset": offset, "limit": most}))

    @app.get("/api/series")
    def series(
        run: Names,
        name: Names,
        x: str = "step",
        points: int = 1000,
        begin: Annotated[float | None, Query(alias="from")] = None,
        end: Annotated[float | None, Query(alias="to")] = None,
    ) -> Response:
        if any(value is not None and math.isnan(value) for value in (begin, end)):
            raise RefusedError("from and to must be numbers")
        return _json(answers.series(run, name, x, points, begin, end))

    @app.get("/api/profile")
    async def profile(
        run: str, capture: str, before: str | None = None, before_run: str | None = None
    ) -> Response:
        asked = (
            [(run, capture)] if before is None else [(before_run or run, before), (run, capture)]
        )
        found = await run_in_threadpool(lambda: [answers.capture(*each) for each in asked])
        key, done = await run_in_threadpool(pages.ask, found)
        await asyncio.shield(asyncio.wrap_future(done))
        return _json({"page": tickets.address("/page", key=key)})

    @app.get("/api/diff")
    def diff(run: Names) -> Response:
        return _json(answers.diff(run))

    @app.post("/api/runs/{path:path}/requests")
    async def ask(path: str, request: Request) -> Response:
        if not control:
            raise HTTPException(403, "this server only reads; start it with --control")
        if request.headers.get("content-type", "").partition(";")[0] != "application/json":
            raise HTTPException(415, "a request is application/json")
        try:
            asked = await request.json()
        except (ValueError, RecursionError) as error:
            raise RefusedError(f"the body is not JSON: {error}") from error
        if not isinstance(asked, dict) or not isinstance(kind := asked.pop("kind", None), str):
            raise RefusedError('a request is an object such as {"kind": "profile", "steps": 5}')
        return _json({"request": await run_in_threadpool(_ask, answers, path, kind, asked)}, 202)


def _ask(answers: Answers, name: str, kind: str, values: dict[str, Any]) -> str:
    run, folder = answers.run(name), answers.store.folder
    top = folder.resolve(run.path)
    if top is None or folder.resolve(run.path / "requests") != f"{top}/requests":
        raise RefusedError("requests/ of this run is a link to elsewhere; remove it")
    return run_requests.ask(run.path, kind, **run_requests.checked(kind, values)).name


def _add_live(app: FastAPI, answers: Answers, watcher: Watcher) -> None:
    @app.get("/api/live")
    async def live(request: Request, run: Names, after: str | None = None) -> Response:
        if len(run) > _MOST_FOLLOWED:
            raise RefusedError(f"at most {_MOST_FOLLOWED} runs can be followed at once")
        found = await run_in_threadpool(lambda: [answers.run(name) for name in run])
        offsets = _offsets(request.headers.get("last-event-id") or after, len(run))
        events = watch_events(answers.store, watcher, found, offsets)
        return StreamingResponse(events, media_type="text/event-stream")


def _offsets(text: str | None, count: int) -> list[int] | None:
    if not text:
        return None
    parts = text.split(",")
    if len(parts) != count or not all(p.isascii() and p.isdecimal() and len(p) < 19 for p in parts):
        raise RefusedError(f"after={text[:100]!r} must be a byte offset for each run= in order")
    return [int(part) for part in parts]


def serve(
    runs: Path,
    *,
    host: str,
    port: int,
    auth: Auth,
    control: bool,
    ready: Callable[[str], None],
) -> int:
    """Serve the page until Ctrl-C or SIGTERM; the exit code.

    Args:
      runs: the folder.
      host: to listen on.
      port: 0 takes one that is free.
      auth: whose token is asked for.
      control: whether runs may be asked for something.
      ready: called with the address, as `host:port`, when it answers.

    Raises:
      ConfigError: there is no such folder, or the address is not to be had.
    """
    if not runs.is_dir():
        raise ConfigError(f"{runs} is not a folder; name the one that run directories are in")
    raise_file_limit()
    return asyncio.run(_serve(RunStore(Folder(runs)), host, port, auth, control, ready))


async def _serve(
    store: RunStore,
    host: str,
    port: int,
    auth: Auth,
    control: bool,
    ready: Callable[[str], None],
) -> int:
    anyio.to_thread.current_default_thread_limiter().total_tokens = _THREADS
    pages = ProfilePages()
    app, watcher = create_app(store, pages, auth, control=control)
    config = server_config(app, _LIMITS, error_body, keep_alive=_KEEP_ALIVE)
    server = HttpServer(config, lambda: listen(host, port, _LIMITS.send_timeout))
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    try:
        try:
            where = await server.start()
        except OSError as error:
            raise ConfigError(
                f"--port {port} of {host} cannot be listened on ({error.strerror or error}); "
                "choose another port, or end the process that has it"
            ) from error
        ready(shown_address(*where))
        await stop.wait()
    finally:
        await watcher.close()
        await asyncio.to_thread(pages.close)
        await server.stop()
        await asyncio.to_thread(store.close)
    return 0
