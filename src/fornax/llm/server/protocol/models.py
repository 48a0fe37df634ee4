"""`GET /v1/models`, and loading and unloading of adapters."""

from typing import Annotated, Literal

from pydantic import Field

from fornax.llm.server.protocol.base import Body, Reply

__all__ = ["Done", "LoadAdapterBody", "Model", "Models", "UnloadAdapterBody"]


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
