"""`POST /v1/embeddings`: texts as vectors."""

import asyncio
import base64
import math
import struct
import time
from collections.abc import Coroutine, Mapping
from typing import Annotated, ClassVar, Literal

from fastapi import APIRouter
from pydantic import Field, model_validator
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from fornax.llm.outputs import EmbeddingOutput
from fornax.llm.server.errors import CLIENT_CLOSED_REQUEST, ApiError
from fornax.llm.server.generation import CancelOnDisconnect
from fornax.llm.server.protocol import (
    INT64,
    Body,
    FailFastList,
    Refused,
    Reply,
    TokenId,
    Usage,
    failures,
    one_by_one,
)
from fornax.llm.server.state import Server, ServerDep
from fornax.llm.server.web import ContextDep, StrictRoute

__all__ = ["EmbeddingBody", "Embeddings", "router"]


_MOST_INPUTS = 2048


class EmbeddingBody(Body):
    """Texts to embed."""

    input: str | FailFastList[TokenId] | FailFastList[str] | FailFastList[FailFastList[TokenId]]
    """A text, its token ids, or several of either."""
    model: str | None = None
    """Name of the model or adapter; without it the model."""
    encoding_format: Literal["float", "base64"] = "float"
    """base64 is that of little-endian float32."""
    dimensions: Annotated[int, Field(ge=1)] | None = None
    """Keeps this many of the first numbers, scaled to unit length again."""
    user: str | None = None
    """Written to the access log."""
    add_special_tokens: bool = True
    """Whether the tokenizer adds its special tokens."""
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=2**63 - 1)] | None = None
    """Keeps this many tokens of each text; -1 as many as the context has room for."""
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
        return one_by_one(self.input)


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


router = APIRouter(tags=["OpenAI"], route_class=StrictRoute)


@router.post(
    "/v1/embeddings",
    response_model=Embeddings,
    responses=failures(404, 429, 503, 504),
)
async def embed(
    body: EmbeddingBody, server: ServerDep, context: ContextDep, request: Request
) -> Response:
    """Embed each text."""
    context.log_fields.update(model=body.model, user=body.user)
    adapter = server.adapter(body.model)
    server.require_ready()
    inputs = [await _encode(body, server, text) for text in body.inputs()]
    server.config.request_limits.check_prompts(sum(map(len, inputs)), 1)
    answer_id = f"embd-{body.request_id or context.id}"
    with server.concurrency.admitted():
        outputs: list[EmbeddingOutput] = []
        async with (
            CancelOnDisconnect(request.receive) as client,
            asyncio.timeout(server.config.request_timeout or None),
        ):
            outputs = await _together(
                [
                    _one(body, server, adapter, ids, server.engine_id(answer_id, context))
                    for ids in inputs
                ]
            )
    if client.disconnected:
        context.status = CLIENT_CLOSED_REQUEST
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    tokens = sum(map(len, inputs))
    context.log_fields["prompt_tokens"] = tokens
    content = {
        "id": answer_id,
        "object": "list",
        "created": int(time.time()),
        "model": body.model or server.names[0],
        "data": [
            {"index": number, "object": "embedding", "embedding": _vector(body, output)}
            for number, output in enumerate(outputs)
        ],
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0},
    }
    return Response(to_json(content), media_type="application/json")


async def _encode(body: EmbeddingBody, server: Server, text: str | list[int]) -> list[int]:
    most = server.encoder.max_model_len
    ids = await server.encoder.tokenize(body, text, reserve=0, side="right")
    if not ids:
        raise ApiError(400, "the input has no tokens; give some text", param="input")
    if len(ids) > most:
        raise ApiError(
            400,
            f"the input has {len(ids)} tokens, the context {most}; shorten it or set "
            "truncate_prompt_tokens",
            param="input",
            code="context_length_exceeded",
        )
    return ids


async def _one(
    body: EmbeddingBody, server: Server, adapter: str | None, ids: list[int], name: str
) -> EmbeddingOutput:
    return await server.engine.embed(
        ids,
        request_id=name,
        lora=adapter,
        priority=body.priority,
        cache_salt=body.cache_salt,
    )


async def _together(ones: list[Coroutine[None, None, EmbeddingOutput]]) -> list[EmbeddingOutput]:
    """All results; the first failure ends the others."""
    tasks = [asyncio.create_task(one) for one in ones]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _vector(body: EmbeddingBody, output: EmbeddingOutput) -> list[float] | str:
    """The embedding as asked for: shortened, as numbers or as base64."""
    vector = output.embedding
    if body.dimensions is not None:
        if body.dimensions > len(vector):
            raise ApiError(
                400,
                f"dimensions={body.dimensions} is above the model's {len(vector)}",
                param="dimensions",
            )
        vector = vector[: body.dimensions]
        length = math.sqrt(sum(x * x for x in vector)) or 1.0
        vector = [x / length for x in vector]
    if body.encoding_format == "float":
        return vector
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
