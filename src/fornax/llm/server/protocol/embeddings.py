"""`POST /v1/embeddings`: its request and its answer."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from fornax.llm.server.errors import ApiError
from fornax.llm.server.protocol.base import INT64, Body, Listed, Refused, Reply, TokenId, Usage

__all__ = ["EmbeddingBody", "Embeddings"]

_MOST_INPUTS = 2048


class EmbeddingBody(Body):
    """Texts to embed."""

    input: str | Listed[TokenId] | Listed[str] | Listed[Listed[TokenId]]
    """A text, its token ids, or several of either."""
    model: str | None = None
    """Name of the model or adapter; without it the model."""
    encoding_format: Literal["float", "base64"] = "float"
    """base64 is that of little-endian float32."""
    dimensions: Annotated[int, Field(ge=1)] | None = None
    """Keeps so many of the first numbers, scaled to unit length again."""
    user: str | None = None
    """Written to the access log."""
    add_special_tokens: bool = True
    """Whether the tokenizer adds its special tokens."""
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=2**63 - 1)] | None = None
    """Keeps so many tokens of each text; -1 as many as the context has room for."""
    truncation_side: Literal["left", "right"] | None = None
    """Which end of a truncated text is cut off; right without it."""
    priority: Annotated[int, INT64] = 0
    """Lower is served earlier, with the scheduling policy `priority`."""
    request_id: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """Becomes part of the answer's id."""
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    """Shares cached prefixes only among requests with the same salt."""

    refused: ClassVar[Mapping[str, Refused]] = {
        "normalize": Refused("embeddings have unit length", (True,)),
        "use_activation": Refused("embeddings have unit length", (True,)),
        "messages": Refused("give the text as input"),
        "embed_dtype": Refused("use encoding_format", ("float32",)),
        "endianness": Refused("base64 is little-endian", ("native", "little")),
        "mm_processor_kwargs": Refused("input is text", ({},)),
    }

    @model_validator(mode="after")
    def _not_empty(self) -> "EmbeddingBody":
        if self.input == []:
            raise ApiError(400, "input is empty; give a text or token ids", param="input")
        if len(self.inputs()) > _MOST_INPUTS:
            raise ApiError(
                400,
                f"input has {len(self.inputs())} texts; send at most {_MOST_INPUTS}",
                param="input",
            )
        return self

    def inputs(self) -> list[str] | list[list[int]]:
        """The texts one by one."""
        given: Any = self.input
        return given if isinstance(given, list) and not isinstance(given[0], int) else [given]


class Embedding(Reply):
    index: int
    object: Literal["embedding"]
    embedding: list[float] | str


class Embeddings(Reply):
    """The answer: an embedding for each text."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Embedding]
    usage: Usage
