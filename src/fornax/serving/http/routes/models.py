"""Health, and what the server tells of itself and its models."""

from fastapi import APIRouter, Response

from fornax.config import ServingCode, ServingError
from fornax.serving.http import schemas
from fornax.serving.http.documented import DocumentedRoute, answer, failures
from fornax.serving.http.parts import Parts, PartsOf
from fornax.serving.v2 import documents

__all__ = ["health", "models"]

health = APIRouter(tags=["Health"], route_class=DocumentedRoute)
models = APIRouter(tags=["Models"], route_class=DocumentedRoute)

_MODEL = "/v2/models/{model}"
_VERSION = "/v2/models/{model}/versions/{version}"
_ABSENT = failures(404, 503)


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


@health.get(_MODEL + "/ready", response_model=schemas.ModelReady, responses=_ABSENT)
async def model_ready(parts: PartsOf, model: str) -> Response:
    """Whether a model takes requests."""
    return _ready(parts, model, "")


@health.get(_VERSION + "/ready", response_model=schemas.ModelReady, responses=_ABSENT)
async def version_ready(parts: PartsOf, model: str, version: str) -> Response:
    """Whether a version of a model takes requests."""
    return _ready(parts, model, version)


def _ready(parts: Parts, model: str, version: str) -> Response:
    if not parts.host.model_ready(model, version):
        which = f"{model!r}, version {version}," if version else f"{model!r}"
        raise ServingError(ServingCode.UNAVAILABLE, f"model {which} is not ready")
    return answer({"name": model, "ready": True})


@models.get("/v2", response_model=schemas.ServerMetadata, responses=failures())
async def server() -> Response:
    """Who answers, and what it can do."""
    return answer(documents.server_metadata())


@models.get("/v2/models/stats", response_model=schemas.Statistics, responses=failures())
async def statistics(parts: PartsOf) -> Response:
    """What every model has done, and where the time went."""
    return answer(documents.statistics(parts.host.statistics()))


@models.get(_MODEL + "/stats", response_model=schemas.Statistics, responses=_ABSENT)
async def model_statistics(parts: PartsOf, model: str) -> Response:
    """What a model has done."""
    return answer(documents.statistics(parts.host.statistics(model)))


@models.get(_VERSION + "/stats", response_model=schemas.Statistics, responses=_ABSENT)
async def version_statistics(parts: PartsOf, model: str, version: str) -> Response:
    """What a version of a model has done."""
    return answer(documents.statistics(parts.host.statistics(model, version)))


@models.get(_MODEL + "/config", response_model=schemas.Config, responses=_ABSENT)
async def config(parts: PartsOf, model: str) -> Response:
    """A model's configuration, in the names of Triton's."""
    return answer(parts.host.config(model))


@models.get(_VERSION + "/config", response_model=schemas.Config, responses=_ABSENT)
async def version_config(parts: PartsOf, model: str, version: str) -> Response:
    """The configuration of a version of a model."""
    return answer(parts.host.config(model, version))


@models.get(_MODEL, response_model=schemas.Metadata, responses=_ABSENT)
async def metadata(parts: PartsOf, model: str) -> Response:
    """A model's tensors; `model:function` for another function than its first."""
    return answer(documents.model_metadata(parts.host.metadata(model)))


@models.get(_VERSION, response_model=schemas.Metadata, responses=_ABSENT)
async def version_metadata(parts: PartsOf, model: str, version: str) -> Response:
    """The tensors of a version of a model."""
    return answer(documents.model_metadata(parts.host.metadata(model, version)))
