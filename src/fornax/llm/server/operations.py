"""For probes, operators and scrapers: health, readiness, version, load, metrics; and `/sleep`,
`/wake_up`, `/is_sleeping`, `/reset_prefix_cache` for those who train and develop; `/start_profile`
and `/stop_profile` for those who ask where time goes.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Query
from starlette.responses import Response

from fornax import __version__
from fornax.config.errors import ProfileError
from fornax.llm.server.errors import ApiError, json_response
from fornax.llm.server.protocol import Reply, failures
from fornax.llm.server.state import Server, ServerDep
from fornax.profile import OnDemand

__all__ = ["development", "profiles", "router"]


router = APIRouter(tags=["Operation"])


class Ready(Reply):
    """Whether requests are taken, and how far compiling is."""

    ready: bool
    done: int
    total: int
    seconds_left: float | None


class Version(Reply):
    """The version."""

    version: str


class LoadReply(Reply):
    """How busy the server is."""

    server_load: int
    unfinished: int


@router.get("/health", response_class=Response, responses=failures(503, body=False))
@router.get(
    "/ping", operation_id="ping", response_class=Response, responses=failures(503, body=False)
)
async def health(server: ServerDep) -> Response:
    """200 while the engine lives, also while it compiles."""
    if server.engine.error() is not None:
        raise ApiError(503, "the engine died; the server is stopping", code="engine_dead")
    return Response()


@router.get("/ready", response_model=Ready, responses={503: {"model": Ready}})
async def ready(server: ServerDep) -> Response:
    """200 when requests are taken, else 503; the body tells how far compiling is."""
    state = server.engine.readiness()
    held_up = server.stopping or server.adapters_left or server.engine.error() is not None
    takes = state.ready and not held_up
    content = {
        "ready": takes,
        "done": state.done,
        "total": state.total,
        "seconds_left": state.seconds_left,
    }
    return json_response(content, 200 if takes else 503)


@router.get("/version", response_model=Version, responses=failures(body=False))
async def version() -> Version:
    """The version of Fornax."""
    return Version(version=__version__)


@router.get("/load", response_model=LoadReply, responses=failures(body=False))
async def load(server: ServerDep) -> LoadReply:
    """Requests being answered, and sequences that run or wait in the engine."""
    return LoadReply(
        server_load=server.concurrency.running, unfinished=server.engine.num_unfinished
    )


@router.get("/metrics", response_class=Response, responses=failures(body=False))
async def metrics(server: ServerDep) -> Response:
    """Metrics in the text format of Prometheus, under vLLM's names."""
    if not server.engine.num_unfinished:
        server.metrics.idle()
    text, kind = server.metrics.exposition()
    return Response(text, headers={"content-type": kind})


development = APIRouter(tags=["Development"])


class Sleeping(Reply):
    """Whether the engine sleeps."""

    is_sleeping: bool


@development.post("/sleep", response_class=Response, responses=failures(400, body=False))
async def sleep(server: ServerDep, level: Annotated[int, Query(ge=1, le=2)] = 1) -> Response:
    """Free the cache; running requests start over when the engine wakes."""
    await server.engine.sleep(level)
    server.metrics.set_sleep(level)
    return Response()


@development.post("/wake_up", response_class=Response, responses=failures(body=False))
async def wake_up(server: ServerDep) -> Response:
    """Take the cache back."""
    await server.engine.wake()
    server.metrics.set_sleep(0)
    return Response()


@development.get("/is_sleeping", response_model=Sleeping, responses=failures(body=False))
async def is_sleeping(server: ServerDep) -> Sleeping:
    """Whether the engine sleeps."""
    return Sleeping(is_sleeping=server.engine.is_sleeping)


@development.post("/reset_prefix_cache", response_class=Response, responses=failures(body=False))
async def reset_prefix_cache(server: ServerDep) -> Response:
    """Forget every cached prefix."""
    await server.engine.reset_prefix_cache()
    return Response()


profiles = APIRouter(tags=["Operation"])


class Profiling(Reply):
    """A profile that runs, or ran."""

    directory: str
    """On the server's machine."""
    running: bool


@profiles.post("/start_profile", response_model=Profiling, responses=failures(400, body=False))
async def start_profile(
    server: ServerDep, seconds: Annotated[float | None, Query(gt=0)] = None
) -> Profiling:
    """Capture a profile of the engine and the server for some seconds, `profile_max_seconds` at
    most and by default."""
    longest = server.config.profile_max_seconds
    if seconds is not None and seconds > longest:
        raise ApiError(
            400,
            f"seconds={seconds:g} is more than {longest:g}, which is profile_max_seconds",
            param="seconds",
        )
    folder = await _carry_out(server, lambda captures: captures.start(seconds or longest))
    return Profiling(directory=str(folder), running=True)


@profiles.post("/stop_profile", response_model=Profiling, responses=failures(400, body=False))
async def stop_profile(server: ServerDep) -> Profiling:
    """End the profile that runs; 400 where none was started since."""
    folder = await _carry_out(server, lambda captures: captures.stop())
    return Profiling(directory=str(folder), running=False)


async def _carry_out(server: Server, action: Callable[[OnDemand], Path]) -> Path:
    assert server.captures is not None, "the router is not included without a folder"
    try:
        return await asyncio.to_thread(action, server.captures)
    except ProfileError as error:
        raise ApiError(400, str(error), code="profile") from None
