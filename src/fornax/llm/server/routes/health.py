"""`/health`, `/ready`, `/version`, `/load`, `/metrics`: for probes, operators and scrapers."""

from fastapi import APIRouter
from starlette.responses import Response

from fornax import __version__
from fornax.llm.server.body import failures
from fornax.llm.server.errors import ApiError, json_response
from fornax.llm.server.protocol.base import Reply
from fornax.llm.server.state import ServerOf

__all__ = ["router"]

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
async def health(server: ServerOf) -> Response:
    """200 while the engine lives, also while it compiles."""
    if server.engine.error() is not None:
        raise ApiError(503, "the engine died; the server is stopping", code="engine_dead")
    return Response()


@router.get("/ready", response_model=Ready, responses={503: {"model": Ready}})
async def ready(server: ServerOf) -> Response:
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
async def load(server: ServerOf) -> LoadReply:
    """Requests being answered, and sequences that run or wait in the engine."""
    return LoadReply(server_load=server.load.running, unfinished=server.engine.num_unfinished)


@router.get("/metrics", response_class=Response, responses=failures(body=False))
async def metrics(server: ServerOf) -> Response:
    """Metrics in the text format of Prometheus, under vLLM's names."""
    if not server.engine.num_unfinished:
        server.metrics.idle()
    text, kind = server.metrics.exposition()
    return Response(text, headers={"content-type": kind})
