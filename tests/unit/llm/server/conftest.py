"""The app over an engine without a model, called in this process."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from tests.mock_engine import MockEngine

from fornax.data import Tokenizer, train_bpe
from fornax.llm.server import Metrics, ServerConfig, asgi_app, create_app, create_server
from fornax.llm.server.limits import RefusalPace
from fornax.llm.text import ChatTemplate

TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'bad' %}"
    "{{ raise_exception('no such role') }}{% endif %}"
    "{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if mood %}[{{ mood }}]{% endif %}"
    "{% if tools %}{{ tools[0].function.name }}\n{% endif %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """Every word of `hello world this is a test` is one token."""
    return train_bpe(["hello world this is a test of some text " * 20], 300)


class App:
    """The app and its engine."""

    def __init__(self, engine: MockEngine, config: ServerConfig):
        self.engine = engine
        self.metrics = Metrics("m", max_model_len=engine.max_model_len)
        engine._observer = self.metrics
        self.server = create_server(engine, config, model="m", metrics=self.metrics)
        self.fastapi = create_app(self.server)
        self.asgi = asgi_app(self.fastapi)
        self.asgi._refusals = RefusalPace(burst=10**6)  # a test refuses more than a client does

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        """One request."""

        async def ask() -> httpx.Response:
            transport = httpx.ASGITransport(self.asgi)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                return await client.request(method, path, **options)

        return asyncio.run(ask())

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.request("GET", path, **options)

    def post(self, path: str, json: Any = None, **options: Any) -> httpx.Response:
        return self.request("POST", path, json=json, **options)


@pytest.fixture
def make_app(tokenizer: Tokenizer) -> Iterator[Callable[..., App]]:
    """Makes apps: keywords of MockEngine in `engine`, those of ServerConfig as they are."""
    engines: list[MockEngine] = []

    def make(engine: dict[str, Any] | None = None, **config: Any) -> App:
        template = ChatTemplate(TEMPLATE)
        options = {"max_model_len": 64, "chat_template": template, **(engine or {})}
        made = MockEngine(tokenizer, **options)
        made.start()
        engines.append(made)
        return App(made, ServerConfig(disable_access_log=True, **config))

    yield make
    for engine in engines:
        engine.shutdown()


@pytest.fixture
def app(make_app: Callable[..., App]) -> App:
    """An app with defaults."""
    return make_app()
