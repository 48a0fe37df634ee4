"""What the bodies share: strictness, fields refused by name, usage, the options of a stream."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from fornax.llm.server.errors import ApiError

__all__ = [
    "INT64",
    "Body",
    "ErrorAnswer",
    "Listed",
    "Mapped",
    "Refused",
    "Reply",
    "StreamOptions",
    "Usage",
]

INT64 = Field(ge=-(2**63), le=2**63 - 1)
T = TypeVar("T")
Listed = Annotated[list[T], Field(fail_fast=True)]
"""A list that is read up to its first error: to describe 100,000 of them takes seconds."""
_MOST_FIELDS = 256
"""Fields of an object, known or not: each unknown one would be described."""
_MOST_NAMES = 1024


def _few(value: Any) -> Any:
    """Refuse an object of too many names before its values, as each wrong one is described."""
    if isinstance(value, dict) and len(value) > _MOST_NAMES:
        message = "it has {size} names; at most {most} are taken"
        raise PydanticCustomError("too_many", message, {"size": len(value), "most": _MOST_NAMES})
    return value


Mapped = Annotated[dict[str, T], BeforeValidator(_few)]
"""An object of any names, up to 1,024 of them: as many as `logit_bias` may have."""


@dataclass(frozen=True)
class Refused:
    """A field that OpenAI or vLLM know and Fornax does not honour."""

    reason: str
    """Why, and what to do instead."""
    neutral: tuple[Any, ...] = ()
    """Values that ask for nothing: these and null pass."""

    def check(self, name: str, value: Any) -> None:
        """400 naming the field when its value asks for something."""
        if value is None or any(value == n and type(value) is type(n) for n in self.neutral):
            return
        raise ApiError(400, f"{name} is not supported: {self.reason}", param=name)


class Body(BaseModel):
    """A request's body: plain JSON types, no unknown fields, finite numbers."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        protected_namespaces=(),
        use_attribute_docstrings=True,
    )

    refused: ClassVar[Mapping[str, Refused]] = {}
    """Known fields that get 400 unless their value asks for nothing."""

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if len(data) > _MOST_FIELDS:
            message = f"an object of the body has {len(data)} fields; send at most {_MOST_FIELDS}"
            raise ApiError(400, message)
        if not cls.refused:
            return data
        for name in data.keys() & cls.refused.keys():
            cls.refused[name].check(name, data[name])
        return {name: value for name, value in data.items() if name not in cls.refused}


class Reply(BaseModel):
    """An answer's body, as the OpenAPI document describes it."""

    model_config = ConfigDict(protected_namespaces=())


class StreamOptions(Body):
    """What a stream carries besides its text."""

    include_usage: bool | None = False
    """Whether a last chunk has the usage."""
    continuous_usage_stats: bool | None = False
    """Whether every chunk has the usage so far."""

    refused: ClassVar[Mapping[str, Refused]] = {
        "include_obfuscation": Refused("chunks are not padded", (False,)),
    }


class PromptTokensDetails(Reply):
    cached_tokens: int


class Usage(Reply):
    """Tokens that a request took."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int | None = None
    prompt_tokens_details: PromptTokensDetails | None = None


class _Error(Reply):
    message: str
    type: str
    param: str | None
    code: str | int | None


class ErrorAnswer(Reply):
    """What every failure answers."""

    error: _Error


TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
