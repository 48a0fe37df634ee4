"""The server's answers hold the experts that tokens took, where the engine returns them."""

import asyncio
import base64
import io
import json
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from flax import nnx
from tests.unit.tune import mixture

from fornax.data import train_bpe
from fornax.llm.async_engine import AsyncEngine
from fornax.llm.build import build_engine
from fornax.llm.config import EngineConfig
from fornax.llm.server import Metrics, ServerConfig, asgi_app, create_app, create_server

PROMPT = [9, 20, 31, 7, 7]


@pytest.fixture(scope="module")
def engine() -> Iterator[AsyncEngine]:
    config = EngineConfig(
        max_num_seqs=4,
        max_num_batched_tokens=16,
        max_model_len=48,
        block_size=4,
        step_sizes="coarse",
        enable_return_routed_experts=True,
    )
    tokenizer = train_bpe(["the number is higher lower correct guess"], vocab_size=290)
    made = AsyncEngine(build_engine(mixture.decoder(), config, tokenizer=tokenizer))
    made.start()
    made.wait_ready()
    yield made
    made.shutdown()


def answer(engine: AsyncEngine, path: str, **body: Any) -> httpx.Response:
    metrics = Metrics("m", max_model_len=48)
    config = ServerConfig(disable_access_log=True, chat_template="{{ messages[0].content }}")
    server = create_server(engine, config, model="m", metrics=metrics)

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(asgi_app(create_app(server)))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.post(path, json={"model": "m", "temperature": 0, **body})

    found = asyncio.run(ask())
    assert found.status_code == 200, found.text
    return found


def check(field: str, tokens: list[int]) -> None:
    """They are those that the float64 reference takes for all tokens but the last."""
    routed = np.load(io.BytesIO(base64.b64decode(field)), allow_pickle=False)
    params = mixture.wide(nnx.state(mixture.decoder()))
    _, expected = mixture.reference(params, np.array(tokens[:-1]))
    assert routed.dtype == np.uint8
    np.testing.assert_array_equal(routed, expected)


def test_a_completion_says_which_experts_its_tokens_took(engine: AsyncEngine) -> None:
    asked = {"prompt": PROMPT, "max_tokens": 6, "ignore_eos": True, "return_token_ids": True}
    [choice] = answer(engine, "/v1/completions", **asked).json()["choices"]
    check(choice["routed_experts"], [*PROMPT, *choice["token_ids"]])


def test_the_last_event_of_a_stream_has_them(engine: AsyncEngine) -> None:
    """Also where events hold several tokens."""
    for interval in (1, 4):
        asked = {"prompt": PROMPT, "max_tokens": 6, "ignore_eos": True, "stream": True}
        more = {"return_token_ids": True, "stream_interval": interval}
        text = answer(engine, "/v1/completions", **asked, **more).text
        lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
        choices = [json.loads(line)["choices"][0] for line in lines if line != "[DONE]"]
        assert [bool(choice.get("routed_experts")) for choice in choices].index(True) == (
            len(choices) - 1
        )
        tokens = [token for choice in choices for token in choice["token_ids"]]
        check(choices[-1]["routed_experts"], [*PROMPT, *tokens])


def test_a_chat_has_them_in_each_choice(engine: AsyncEngine) -> None:
    asked = {"messages": [{"role": "user", "content": "higher"}], "max_tokens": 5, "n": 2}
    more = {"ignore_eos": True, "return_token_ids": True, "seed": 3} | {"temperature": 1.0}
    said = answer(engine, "/v1/chat/completions", **asked, **more).json()
    for choice in said["choices"]:
        check(choice["routed_experts"], [*said["prompt_token_ids"], *choice["token_ids"]])
