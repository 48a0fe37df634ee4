"""Models loaded, unloaded and rolled back while the server runs."""

import dataclasses
from typing import Any

from fastapi import APIRouter, Response

from fornax.config import ServingCode, ServingError
from fornax.serving.http import schemas
from fornax.serving.http.documented import DocumentedRoute, answer, failures
from fornax.serving.http.parts import PartsOf
from fornax.serving.v2 import documents
from fornax.serving.v2.datatypes import refuse

__all__ = ["repository"]

repository = APIRouter(tags=["Repository"], route_class=DocumentedRoute)


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
