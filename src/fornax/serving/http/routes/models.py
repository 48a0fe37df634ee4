"""Health, and what the server tells of itself and its models."""

from fastapi import APIRouter, Response

from fornax.config import ServingCode, ServingError
from fornax.serving.http import schemas
from fornax.serving.http.routing import (
    Context,
    DocumentedRoute,
    ServerContext,
    failures,
    respond,
)
from fornax.serving.v2 import documents

__all__ = ["health", "models"]

health = APIRouter(tags=["Health"], route_class=DocumentedRoute)
models = APIRouter(tags=["Models"], route_class=DocumentedRoute)

_MODEL = "/v2/models/{model}"
_VERSION = "/v2/models/{model}/versions/{version}"
_ABSENT = failures(404, 503)


@health.get("/v2/health/live", response_model=schemas.Live, responses=failures(503))
async def live(context: Context) -> Response:
    """Whether the server runs."""
    if not context.host.live():
        raise ServingError(ServingCode.UNAVAILABLE, "the server is stopping")
    return respond({"live": True})


@health.get("/v2/health/ready", response_model=schemas.Ready, responses=failures(503))
async def ready(context: Context) -> Response:
    """Whether the server takes requests."""
    if not context.host.ready():
        raise ServingError(
            ServingCode.UNAVAILABLE, "the server is not ready; the repository's index says why"
        )
    return respond({"ready": True})


@health.get(_MODEL + "/ready", response_model=schemas.ModelReady, responses=_ABSENT)
async def model_ready(context: Context, model: str) -> Response:
    """Whether a model takes requests."""
    return _ready(context, model, "")


@health.get(_VERSION + "/ready", response_model=schemas.ModelReady, responses=_ABSENT)
async def version_ready(context: Context, model: str, version: str) -> Response:
    """Whether a version of a model takes requests."""
    return _ready(context, model, version)


def _ready(context: ServerContext, model: str, version: str) -> Response:
    if not context.host.model_ready(model, version):
        which = f"{model!r}, version {version}," if version else f"{model!r}"
        raise ServingError(ServingCode.UNAVAILABLE, f"model {which} is not ready")
    return respond({"name": model, "ready": True})


@models.get("/v2", response_model=schemas.ServerMetadata, responses=failures())
async def server() -> Response:
    """Who answers, and what it can do."""
    return respond(documents.server_metadata())


@models.get("/v2/models/stats", response_model=schemas.Statistics, responses=failures())
async def statistics(context: Context) -> Response:
    """What every model has done, and where the time went."""
    return respond(documents.statistics(context.host.statistics()))


@models.get(_MODEL + "/stats", response_model=schemas.Statistics, responses=_ABSENT)
async def model_statistics(context: Context, model: str) -> Response:
    """What a model has done."""
    return respond(documents.statistics(context.host.statistics(model)))


@models.get(_VERSION + "/stats", response_model=schemas.Statistics, responses=_ABSENT)
async def version_statistics(context: Context, model: str, version: str) -> Response:
    """What a version of a model has done."""
    return respond(documents.statistics(context.host.statistics(model, version)))


@models.get(_MODEL + "/config", response_model=schemas.Config, responses=_ABSENT)
async def config(context: Context, model: str) -> Response:
    """A model's configuration, in the names of Triton's."""
    return respond(context.host.config(model))


@models.get(_VERSION + "/config", response_model=schemas.Config, responses=_ABSENT)
async def version_config(context: Context, model: str, version: str) -> Response:
    """The configuration of a version of a model."""
    return respond(context.host.config(model, version))


@models.get(_MODEL, response_model=schemas.Metadata, responses=_ABSENT)
async def metadata(context: Context, model: str) -> Response:
    """A model's tensors; `model:function` for another function than its first."""
    return respond(documents.model_metadata(context.host.metadata(model)))


@models.get(_VERSION, response_model=schemas.Metadata, responses=_ABSENT)
async def version_metadata(context: Context, model: str, version: str) -> Response:
    """The tensors of a version of a model."""
    return respond(documents.model_metadata(context.host.metadata(model, version)))
