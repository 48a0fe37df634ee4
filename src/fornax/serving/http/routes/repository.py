"""Models loaded, unloaded and rolled back while the server runs."""

import dataclasses

from fastapi import APIRouter, Response

from fornax.config import ServingCode, ServingError
from fornax.serving.http import schemas
from fornax.serving.http.routing import Context, DocumentedRoute, failures, respond
from fornax.serving.v2 import documents
from fornax.serving.v2.datatypes import refuse

__all__ = ["repository"]

repository = APIRouter(tags=["Repository"], route_class=DocumentedRoute)


@repository.post(
    "/v2/repository/index", response_model=list[schemas.IndexEntry], responses=failures()
)
async def index(context: Context, body: schemas.IndexBody | None = None) -> Response:
    """Every version of every model in the repository."""
    return respond(documents.index(context.host.index(body is not None and body.ready)))


@repository.post(
    "/v2/repository/models/{model}/load",
    response_model=schemas.Empty,
    responses=failures(404, 409, 429, 501, 503),
)
async def load(context: Context, model: str, body: schemas.LoadBody | None = None) -> Response:
    """Load what the model's version policy selects, or one version; answers when it is ready."""
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
    await context.host.load(model, version)
    return respond({})


@repository.post(
    "/v2/repository/models/{model}/unload",
    response_model=schemas.Empty,
    responses=failures(404, 409, 501, 503),
)
async def unload(context: Context, model: str, body: schemas.UnloadBody | None = None) -> Response:
    """Unload a model, or one version; requests that are accepted are answered first."""
    parameters = {} if body is None else dict(body.parameters)
    dependents = parameters.pop("unload_dependents", False)
    if type(dependents) is not bool:
        raise refuse(f"unload_dependents={repr(dependents)[:40]} is not a truth value")
    version = _version(parameters)
    _no_more(parameters)
    await context.host.unload(model, version)
    return respond({})


@repository.post(
    "/v2/repository/models/{model}/rollback",
    response_model=schemas.RolledBack,
    responses=failures(404, 409, 503),
)
async def rollback(context: Context, model: str, body: schemas.LoadBody | None = None) -> Response:
    """Serve the version before, or parameter `version`, and withhold those above it."""
    parameters = {} if body is None else dict(body.parameters)
    version = _version(parameters)
    _no_more(parameters)
    return respond(dataclasses.asdict(await context.host.rollback(model, version)))


@repository.post(
    "/v2/repository/models/{model}/release",
    response_model=schemas.Empty,
    responses=failures(404, 409, 503),
)
async def release(context: Context, model: str) -> Response:
    """End a rollback: the newest version serves again."""
    await context.host.release(model)
    return respond({})


@repository.get(
    "/v2/repository/models/{model}/shadow",
    response_model=schemas.Shadow,
    responses=failures(404, 409, 503),
)
async def shadow(context: Context, model: str) -> Response:
    """How the outputs of the model's shadow version differ from those that were served."""
    return respond(context.host.shadow_report(model))


def _version(parameters: dict[str, object]) -> str:
    version = parameters.pop("version", "")
    if type(version) is int and version >= 0:
        return str(version)
    if type(version) is not str:
        raise refuse(f"parameter version={repr(version)[:40]} is not a version; it is like '3'")
    return version


def _no_more(parameters: dict[str, object]) -> None:
    if parameters:
        raise refuse(f"parameter {min(parameters)[:80]!r} has no meaning here; remove it")
