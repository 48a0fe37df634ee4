"""`POST /v1/embeddings`: texts as vectors."""

import asyncio
import base64
import math
import struct
import time
from collections.abc import Coroutine
from typing import Any

from fastapi import APIRouter
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from fornax.llm.outputs import EmbeddingOutput
from fornax.llm.server.answer import Client
from fornax.llm.server.body import StrictRoute, failures
from fornax.llm.server.errors import ApiError
from fornax.llm.server.protocol.embeddings import EmbeddingBody, Embeddings
from fornax.llm.server.state import RecordOf, Server, ServerOf

__all__ = ["router"]

router = APIRouter(tags=["OpenAI"], route_class=StrictRoute)


@router.post(
    "/v1/embeddings",
    response_model=Embeddings,
    responses=failures(404, 429, 503, 504),
)
async def embed(
    body: EmbeddingBody, server: ServerOf, record: RecordOf, request: Request
) -> Response:
    """Embed each text."""
    record.fields.update(model=body.model, user=body.user)
    adapter = server.adapter(body.model)
    server.require_ready()
    inputs = [await _encode(body, server, text) for text in body.inputs()]
    server.config.request_limits.check_prompts(sum(map(len, inputs)), 1)
    answer_id = f"embd-{body.request_id or record.id}"
    with server.load.admitted():
        outputs: list[EmbeddingOutput] = []
        async with (
            Client(request.receive) as client,
            asyncio.timeout(server.config.request_timeout or None),
        ):
            outputs = await _together(
                [_one(body, server, adapter, ids, server.engine_id(answer_id)) for ids in inputs]
            )
    if client.gone:
        record.status = 499
        return Response(status_code=499)
    tokens = sum(map(len, inputs))
    record.fields["prompt_tokens"] = tokens
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
    keep = body.truncate_prompt_tokens
    if isinstance(text, str):
        text = await server.encoder.encode(
            text, add_special_tokens=body.add_special_tokens, truncated=keep is not None
        )
    most = server.encoder.max_model_len
    ids = server.encoder.truncate(text, keep, body.truncation_side or "right", most)
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


def _vector(body: EmbeddingBody, output: EmbeddingOutput) -> Any:
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
