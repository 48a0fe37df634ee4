"""The answers of an engine to V2 requests: whole, or piece by piece as the text is made."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Iterator

from fornax.config import EngineError, ServingCode, ServingError
from fornax.llm.async_engine import EngineDead
from fornax.llm.host_tensors import Asked
from fornax.llm.outputs import RequestOutput
from fornax.llm.server.errors import ApiError
from fornax.llm.server.state import Server

__all__ = ["pieces", "told", "whole"]

_CODES = {code.http: code for code in ServingCode}


async def whole(server: Server, asked: Asked, priority: int, ids: Iterator[str]) -> list[str]:
    """The completions of each prompt; the engine's requests are named by `ids`."""
    encoded = [await _encode(server, prompt) for prompt in asked.prompts]
    server.config.request_limits.check_prompts(sum(map(len, encoded)), asked.params.n)
    tasks = [
        asyncio.ensure_future(_last(_outputs(server, asked, prompt, tokens, priority, next(ids))))
        for prompt, tokens in zip(asked.prompts, encoded, strict=True)
    ]
    try:
        done = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    return [
        (prompt if asked.echo else "") + completion.text
        for prompt, output in zip(asked.prompts, done, strict=True)
        for completion in output.outputs
    ]


async def pieces(
    server: Server, asked: Asked, priority: int, ids: Iterator[str]
) -> AsyncGenerator[tuple[list[str], bool]]:
    """What is new of each of the one prompt's completions, and whether it is the last."""
    (prompt,) = asked.prompts
    tokens = await _encode(server, prompt)
    server.config.request_limits.check_prompts(len(tokens), asked.params.n)
    outputs = _outputs(server, asked, prompt, tokens, priority, next(ids))
    async with contextlib.aclosing(outputs):
        async for output in outputs:
            texts = [""] * asked.params.n
            for completion in output.outputs:
                texts[completion.index] = completion.text
            if output.finished or any(texts):
                yield texts, output.finished


async def _encode(server: Server, prompt: str) -> list[int]:
    return await server.encoder.encode(prompt, add_special_tokens=True)


async def _outputs(
    server: Server, asked: Asked, prompt: str, tokens: list[int], priority: int, name: str
) -> AsyncGenerator[RequestOutput]:
    """The engine's outputs; closing them aborts."""
    room = server.encoder.room(tokens, asked.params.max_tokens)
    outputs = server.engine.generate(
        tokens,
        dataclasses.replace(asked.params, max_tokens=room),
        request_id=name,
        priority=priority,
        prompt=prompt,
    )
    try:
        async for output in outputs:
            yield output
    finally:
        await outputs.aclose()  # pyrefly: ignore[missing-attribute]


async def _last(outputs: AsyncGenerator[RequestOutput]) -> RequestOutput:
    last: RequestOutput | None = None
    async with contextlib.aclosing(outputs):
        async for output in outputs:
            last = output
    assert last is not None  # the engine ends with an output or raises
    return last


@contextlib.contextmanager
def told() -> Iterator[None]:
    """Tell of what the engine and its server refuse as the model server does.

    Raises:
      ServingError: in place of theirs.
    """
    try:
        yield
    except ApiError as error:
        code = _CODES.get(error.status_code, ServingCode.INTERNAL)
        raise ServingError(code, error.message) from error
    except EngineError as error:
        raise ServingError(ServingCode.INVALID_ARGUMENT, str(error)) from error
    except EngineDead as error:
        raise ServingError(ServingCode.UNAVAILABLE, str(error)) from error
