"""Every call that is no inference: health, metadata, repository, statistics, shared memory."""

import dataclasses
from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Request, Response

from fornax import __version__
from fornax.config import ServingCode, ServingError
from fornax.serving.events import Events
from fornax.serving.http import schemas
from fornax.serving.http.documented import DocumentedRoute, answer, failures, install_errors
from fornax.serving.http.openapi import describe
from fornax.serving.v2 import documents, settings
from fornax.serving.v2.datatypes import refuse
from fornax.serving.v2.shared_memory import CUDA_REFUSED, SharedMemory

__all__ = ["Parts", "create_routes"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parts:
    """What the routes stand on."""

    host: Any
    shared_memory: SharedMemory
    metrics: Callable[[], tuple[bytes, str]] | None
    trace_sample_rate: float
    events: Events | None


async def _parts(request: Request) -> Parts:
    return request.app.state.parts


PartsOf = Annotated[Parts, Depends(_parts)]

health = APIRouter(tags=["Health"], route_class=DocumentedRoute)
models = APIRouter(tags=["Models"], route_class=DocumentedRoute)
repository = APIRouter(tags=["Repository"], route_class=DocumentedRoute)
memory = APIRouter(tags=["Shared memory"], route_class=DocumentedRoute)
operations = APIRouter(tags=["Operations"], route_class=DocumentedRoute)


@health.get("/v2/health/live", response_model=schemas.Live, responses=failures(503))
async def live(parts: PartsOf) -> Response:
    """Whether the server runs."""
    if not parts.host.live():
        raise ServingError(ServingCode.UNAVAILABLE, "the server is stopping")
    return answer({"live": True})


@health.get("/v2/health/ready", response_model=schemas.Ready, responses=failures(503))
async def ready(parts: PartsOf) -> Response:
    """Whether the server takes requests."""
    if not parts.host.ready():
        raise ServingError(
            ServingCode.UNAVAILABLE, "the server is not ready; the repository's index says why"
        )
    return answer({"ready": True})


@health.get(
    "/v2/models/{model}/ready", response_model=schemas.ModelReady, responses=failures(404, 503)
)
@health.get(
    "/v2/models/{model}/versions/{version}/ready",
    name="version_ready",
    response_model=schemas.ModelReady,
    responses=failures(404, 503),
)
async def model_ready(parts: PartsOf, model: str, version: str = "") -> Response:
    """Whether a model, or one version of it, takes requests."""
    if not parts.host.model_ready(model, version):
        which = f"{model!r}, version {version}," if version else f"{model!r}"
        raise ServingError(ServingCode.UNAVAILABLE, f"model {which} is not ready")
    return answer({"name": model, "ready": True})


@models.get("/v2", response_model=schemas.ServerMetadata, responses=failures())
async def server(parts: PartsOf) -> Response:
    """Who answers, and what it can do."""
    return answer(documents.server_metadata())


@models.get("/v2/models/stats", response_model=schemas.Statistics, responses=failures())
@models.get(
    "/v2/models/{model}/stats",
    name="model_statistics",
    response_model=schemas.Statistics,
    responses=failures(404, 503),
)
@models.get(
    "/v2/models/{model}/versions/{version}/stats",
    name="version_statistics",
    response_model=schemas.Statistics,
    responses=failures(404, 503),
)
async def statistics(parts: PartsOf, model: str = "", version: str = "") -> Response:
    """What models have done, and where the time went."""
    return answer(documents.statistics(parts.host.statistics(model, version)))


@models.get(
    "/v2/models/{model}/config", response_model=schemas.Config, responses=failures(404, 503)
)
@models.get(
    "/v2/models/{model}/versions/{version}/config",
    name="version_config",
    response_model=schemas.Config,
    responses=failures(404, 503),
)
async def config(parts: PartsOf, model: str, version: str = "") -> Response:
    """A model's configuration, in the names of Triton's."""
    return answer(parts.host.config(model, version))


@models.get("/v2/models/{model}", response_model=schemas.Metadata, responses=failures(404, 503))
@models.get(
    "/v2/models/{model}/versions/{version}",
    name="version_metadata",
    response_model=schemas.Metadata,
    responses=failures(404, 503),
)
async def metadata(parts: PartsOf, model: str, version: str = "") -> Response:
    """A model's tensors; `model:function` for another function than its first."""
    return answer(documents.model_metadata(parts.host.metadata(model, version)))


@repository.post(
    "/v2/repository/index", response_model=list[schemas.IndexEntry], responses=failures()
)
async def index(parts: PartsOf, body: schemas.IndexBody | None = None) -> Response:
    """Every version of every model in the repository."""
    return answer(documents.index(parts.host.index(body is not None and body.ready)))


@repository.post(
    "/v2/repository/models/{model}/load",
    response_model=schemas.Empty,
    responses=failures(404, 409, 429, 501, 503),
)
async def load(parts: PartsOf, model: str, body: schemas.LoadBody | None = None) -> Response:
    """Load what the model's version policy wants, or one version; answers when it is ready."""
    parameters = {} if body is None else dict(body.parameters)
    for name in parameters:
        if name == "config" or name.startswith("file:"):
            raise ServingError(
                ServingCode.UNIMPLEMENTED,
                f"parameter {name[:80]!r} is not taken: models come from the repository's folder "
                "and are configured by their serving.yaml there",
            )
    version = _version(parameters)
    _no_more(parameters)
    await parts.host.load(model, version)
    return answer({})


@repository.post(
    "/v2/repository/models/{model}/unload",
    response_model=schemas.Empty,
    responses=failures(404, 409, 501, 503),
)
async def unload(parts: PartsOf, model: str, body: schemas.UnloadBody | None = None) -> Response:
    """Unload a model, or one version; requests that are accepted are answered first."""
    parameters = {} if body is None else dict(body.parameters)
    dependents = parameters.pop("unload_dependents", False)
    if type(dependents) is not bool:
        raise refuse(f"unload_dependents={repr(dependents)[:40]} is no truth value")
    version = _version(parameters)
    _no_more(parameters)
    await parts.host.unload(model, version)
    return answer({})


@repository.post(
    "/v2/repository/models/{model}/rollback",
    response_model=schemas.RolledBack,
    responses=failures(404, 409, 503),
)
async def rollback(parts: PartsOf, model: str, body: schemas.LoadBody | None = None) -> Response:
    """Serve the version before, or parameter `version`, and withhold those above it."""
    parameters = {} if body is None else dict(body.parameters)
    version = _version(parameters)
    _no_more(parameters)
    return answer(dataclasses.asdict(await parts.host.rollback(model, version)))


@repository.post(
    "/v2/repository/models/{model}/release",
    response_model=schemas.Empty,
    responses=failures(404, 409, 503),
)
async def release(parts: PartsOf, model: str) -> Response:
    """End a rollback: the newest version serves again."""
    await parts.host.release(model)
    return answer({})


@repository.get(
    "/v2/repository/models/{model}/shadow",
    response_model=schemas.Shadow,
    responses=failures(404, 409, 503),
)
async def shadow(parts: PartsOf, model: str) -> Response:
    """How the outputs of the model's shadow version differ from those that were served."""
    return answer(parts.host.shadow_report(model))


@memory.get(
    "/v2/systemsharedmemory/status",
    response_model=list[schemas.RegionAnswer],
    responses=failures(),
)
@memory.get(
    "/v2/systemsharedmemory/region/{region}/status",
    name="one_region_status",
    response_model=list[schemas.RegionAnswer],
    responses=failures(),
)
async def region_status(parts: PartsOf, region: str = "") -> Response:
    """The registered regions."""
    return answer(documents.regions(parts.shared_memory.regions(region)))


@memory.post(
    "/v2/systemsharedmemory/region/{region}/register",
    response_model=schemas.Empty,
    responses=failures(409, 429, 501),
)
async def register(parts: PartsOf, region: str, body: schemas.RegisterBody) -> Response:
    """Name a span of system shared memory, for tensors of this machine's clients."""
    parts.shared_memory.register(region, body.key, body.byte_size, body.offset)
    return answer({})


@memory.post(
    "/v2/systemsharedmemory/unregister", response_model=schemas.Empty, responses=failures()
)
@memory.post(
    "/v2/systemsharedmemory/region/{region}/unregister",
    name="unregister_region",
    response_model=schemas.Empty,
    responses=failures(),
)
async def unregister(parts: PartsOf, region: str = "") -> Response:
    """Forget a region, or all."""
    parts.shared_memory.unregister(region)
    return answer({})


@memory.get(
    "/v2/cudasharedmemory/status", response_model=list[schemas.RegionAnswer], responses=failures()
)
async def cuda_status(parts: PartsOf) -> Response:
    """No region: CUDA shared memory is not served."""
    return answer([])


@memory.get(
    "/v2/cudasharedmemory/region/{region}/status",
    name="cuda_region_status",
    response_model=list[schemas.RegionAnswer],
    responses=failures(501),
)
@memory.post(
    "/v2/cudasharedmemory/region/{region}/register",
    name="register_cuda",
    response_model=schemas.Empty,
    responses=failures(501),
)
async def cuda(parts: PartsOf, region: str) -> Response:
    """Refused: CUDA shared memory is not served."""
    raise ServingError(ServingCode.UNIMPLEMENTED, CUDA_REFUSED)


@memory.post("/v2/cudasharedmemory/unregister", response_model=schemas.Empty, responses=failures())
@memory.post(
    "/v2/cudasharedmemory/region/{region}/unregister",
    name="unregister_cuda_region",
    response_model=schemas.Empty,
    responses=failures(),
)
async def unregister_cuda(parts: PartsOf, region: str = "") -> Response:
    """Nothing is registered, so there is nothing to forget."""
    return answer({})


@operations.get("/v2/trace/setting", response_model=schemas.TraceSettings, responses=failures())
@operations.get(
    "/v2/models/{model}/trace/setting",
    name="model_trace_settings",
    response_model=schemas.TraceSettings,
    responses=failures(404, 503),
)
async def trace_settings(parts: PartsOf, model: str = "") -> Response:
    """How requests are traced; it is the same for all models."""
    _exists(parts, model)
    return answer(settings.trace_settings(parts.trace_sample_rate))


@operations.post("/v2/trace/setting", response_model=schemas.TraceSettings, responses=failures(501))
@operations.post(
    "/v2/models/{model}/trace/setting",
    name="update_model_trace_settings",
    response_model=schemas.TraceSettings,
    responses=failures(404, 501, 503),
)
async def update_trace_settings(parts: PartsOf, body: dict[str, Any], model: str = "") -> Response:
    """Refused, unless it changes nothing: traces are set up when the server starts."""
    _exists(parts, model)
    return answer(settings.update_trace_settings(body, parts.trace_sample_rate))


@operations.get("/v2/logging", response_model=schemas.LogSettings, responses=failures())
async def log_settings(parts: PartsOf) -> Response:
    """What is logged."""
    return answer(settings.log_settings())


@operations.post("/v2/logging", response_model=schemas.LogSettings, responses=failures(501))
async def update_log_settings(parts: PartsOf, body: dict[str, Any]) -> Response:
    """Log more or less: log_error, log_warning, log_info, log_verbose_level."""
    return answer(settings.update_log_settings(body))


@operations.get(
    "/metrics",
    response_class=Response,
    responses={
        **failures(404),
        200: {"description": "Prometheus' text.", "content": {"text/plain": {}}},
    },
)
async def metrics(parts: PartsOf) -> Response:
    """Metrics, for Prometheus."""
    if parts.metrics is None:
        raise ServingError(ServingCode.NOT_FOUND, "this server has no metrics")
    body, content_type = parts.metrics()
    return Response(body, headers={"content-type": content_type})


def _exists(parts: Parts, model: str) -> None:
    if model:
        parts.host.metadata(model)


def _version(parameters: dict[str, Any]) -> str:
    version = parameters.pop("version", "")
    if type(version) is int and version >= 0:
        return str(version)
    if type(version) is not str:
        raise refuse(f"parameter version={repr(version)[:40]} is no version; it is like '3'")
    return version


def _no_more(parameters: dict[str, Any]) -> None:
    if parameters:
        raise refuse(f"parameter {min(parameters)[:80]!r} has no meaning here; remove it")


def create_routes(parts: Parts) -> FastAPI:
    """The routes, and the OpenAPI document of these and of inference."""
    app = FastAPI(
        title="Fornax",
        version=__version__,
        summary="Models behind the V2 inference protocol.",
        redoc_url=None,
        redirect_slashes=False,
        generate_unique_id_function=lambda route: route.name,
    )
    app.state.parts = parts
    install_errors(app)
    for router in (health, models, repository, memory, operations):
        app.include_router(router)
    app.openapi = lambda: describe(app)  # pyrefly: ignore[bad-assignment]
    return app
