"""`GET /v1/models`, and adapters loaded and unloaded while serving."""

from typing import Annotated, Literal

from fastapi import APIRouter
from pydantic import Field

from fornax.llm.server.errors import ApiError
from fornax.llm.server.protocol import Body, Reply, failures
from fornax.llm.server.state import Server, ServerDep
from fornax.llm.server.web import StrictRoute

__all__ = ["Done", "LoadAdapterBody", "Model", "Models", "UnloadAdapterBody", "adapters", "router"]


class Model(Reply):
    """A model or an adapter."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int | None


class Models(Reply):
    """All of them."""

    object: Literal["list"]
    data: list[Model]


class LoadAdapterBody(Body):
    """An adapter to load."""

    lora_name: Annotated[str, Field(min_length=1, max_length=256)]
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]
    load_inplace: bool = False
    """Whether an adapter of that name is replaced."""


class UnloadAdapterBody(Body):
    """An adapter to unload."""

    lora_name: Annotated[str, Field(min_length=1, max_length=256)]


class Done(Reply):
    """What was done."""

    message: str


router = APIRouter(tags=["OpenAI"], route_class=StrictRoute)
adapters = APIRouter(tags=["Adapters"], route_class=StrictRoute)


@router.get("/v1/models", response_model=Models, responses=failures(body=False))
async def models(server: ServerDep) -> Models:
    """The model under each of its names, then the adapters."""
    return Models(object="list", data=_models(server))


@router.get("/v1/models/{name:path}", response_model=Model, responses=failures(404, body=False))
async def model(name: str, server: ServerDep) -> Model:
    """One of them."""
    for each in _models(server):
        if each.id == name:
            return each
    raise server.unknown(name, server.engine.loras())


def _models(server: Server) -> list[Model]:
    def entry(name: str, root: str, parent: str | None) -> Model:
        return Model(
            id=name,
            object="model",
            created=server.created,
            owned_by="fornax",
            root=root,
            parent=parent,
            max_model_len=server.engine.max_model_len,
        )

    own = [entry(name, server.model, None) for name in server.names]
    loaded = server.engine.loras().items()
    return own + [entry(name, path, server.names[0]) for name, path in loaded]


@adapters.post(
    "/v1/load_lora_adapter",
    response_model=Done,
    responses=failures(503),
)
async def load_adapter(body: LoadAdapterBody, server: ServerDep) -> Done:
    """Load an adapter; requests name it as their model."""
    server.require_ready()
    if body.lora_name in server.names:
        raise ApiError(400, f"{body.lora_name} is the model's name", param="lora_name")
    if body.lora_name in server.engine.loras():
        if not body.load_inplace:
            raise ApiError(
                400,
                f"{body.lora_name} is loaded; unload it first or set load_inplace",
                param="lora_name",
            )
        await server.engine.remove_lora(body.lora_name)
    await server.engine.add_lora(body.lora_name, body.lora_path)
    return Done(message=f"{body.lora_name} is loaded")


@adapters.post(
    "/v1/unload_lora_adapter",
    response_model=Done,
    responses=failures(404, 503),
)
async def unload_adapter(body: UnloadAdapterBody, server: ServerDep) -> Done:
    """Unload an adapter; its running requests are aborted."""
    if body.lora_name not in server.engine.loras():
        raise ApiError(404, f"{body.lora_name} is not loaded", param="lora_name")
    await server.engine.remove_lora(body.lora_name)
    return Done(message=f"{body.lora_name} is unloaded")
