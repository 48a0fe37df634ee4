"""An entry that answers a word at a time, for tests of the protocols."""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import numpy as np

from fornax.config import ServingCode, ServingError

__all__ = ["Talk"]


def _text(text: str) -> Mapping[str, np.ndarray]:
    array = np.empty(1, np.object_)
    array[0] = text.encode()
    return {"text_output": array}


class Talk:
    """Says its words again: `fail` ends it with an error, `wait` lasts until it is cancelled."""

    name, memory, platform = "talk", 0, "fake"

    def __init__(self) -> None:
        self.given_up = 0

    def inputs(self) -> Mapping[str, Any]:
        return {"text_input": ("BYTES", (-1,)), "stream": ("BOOL", (1,))}

    def outputs(self) -> Mapping[str, Any]:
        return {"text_output": ("BYTES", (-1,))}

    async def infer(self, request: Any) -> Mapping[str, np.ndarray]:
        if "stream" in request.inputs and request.inputs["stream"][0]:
            raise ServingError(
                ServingCode.INVALID_ARGUMENT, "stream=true takes a call that streams"
            )
        return _text(await self._said(request))

    async def _said(self, request: Any) -> str:
        words = [word async for word in self._words(request)]
        return " ".join(words)

    async def stream(self, request: Any) -> AsyncGenerator[tuple[Mapping[str, np.ndarray], bool]]:
        if not request.inputs["stream"][0]:
            yield _text(await self._said(request)), True
            return
        async for word in self._words(request):
            yield _text(word), False
        yield _text(""), True

    async def _words(self, request: Any) -> AsyncGenerator[str]:
        for word in request.inputs["text_input"][0].decode().split():
            if word == "fail":
                raise ServingError(ServingCode.UNAVAILABLE, "the engine ended")
            if word == "wait":
                try:
                    await asyncio.Event().wait()
                finally:
                    self.given_up += 1
            await asyncio.sleep(0)
            yield word
