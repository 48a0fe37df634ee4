"""A language model among the models of `fornax host`: OpenAI's routes and V2's, one engine.

A folder of the repository with a `serving.yaml` that says `type: llm`, `model: PATH` (default: the
folder itself) and any key of `fornax serve` but those about listening. The model server knows this
class by its methods alone, and the command connects the two.
"""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

import numpy as np
from prometheus_client.core import Metric
from starlette.types import ASGIApp, Receive, Scope, Send

from fornax.config import ConfigError, EngineError, ServingCode, ServingError, from_mapping
from fornax.gguf import is_gguf
from fornax.llm.async_engine import AsyncEngine, EngineDead
from fornax.llm.host_tensors import INPUTS, OUTPUTS, GenerateRequest, bytes_array, read_request
from fornax.llm.outputs import RequestOutput
from fornax.llm.server.app import asgi_app, create_app, create_server
from fornax.llm.server.errors import ApiError
from fornax.llm.server.launch import ServeConfig, build_observed, engine_metrics
from fornax.llm.server.state import Server
from fornax.llm.stats import Observer

__all__ = ["LLMEntry"]


_CODES = {code.http: code for code in ServingCode}
_POLL = 0.05
_LISTENING = frozenset(
    {
        "api_key",
        "disable_fastapi_docs",
        "enable_dev_endpoints",
        "header_timeout",
        "host",
        "max_connections",
        "max_header_bytes",
        "port",
        "root_path",
        "send_timeout",
        "shutdown_timeout",
        "ssl_certfile",
        "ssl_keyfile",
        "timeout_keep_alive",
        "uds",
    }
)
"""Keys of `fornax serve` about what the model server does itself, or not at all."""
_WEIGHTS = ("*.safetensors", "*.bin")


class V2Request(Protocol):
    """What is read of a request of the V2 protocol."""

    @property
    def inputs(self) -> Mapping[str, np.ndarray]:
        """Tensors by name."""

    @property
    def parameters(self) -> Mapping[str, object]:
        """Fields of SamplingParams that stand outside the tensors."""

    @property
    def priority(self) -> int:
        """Lower is served earlier."""

    @property
    def request_id(self) -> str:
        """Of its whole way; the engine's own id begins with it. Empty: it has none."""


class LLMEntry:
    """One language model; see `fornax.serving.backend.StreamingBackend` for its methods."""

    platform = "fornax_llm"

    def __init__(
        self,
        name: str,
        folder: Path,
        settings: Mapping[str, object],
        build: Callable[[str, ServeConfig, Observer], AsyncEngine] = build_observed,
    ):
        """Read the settings; nothing is loaded.

        Raises:
          ConfigError: a key that `fornax serve` does not have, or that has no meaning here.
        """
        self.name = name
        own = dict(settings)
        model = folder / str(own.pop("model", "."))
        refused = sorted(own.keys() & _LISTENING)
        if refused:
            raise ConfigError(
                f"{folder.name}/serving.yaml: {refused[0]} is a key of fornax serve that means "
                "nothing here, as fornax host listens itself; leave it out"
            )
        own.setdefault("served_model_name", [name])
        own.setdefault("disable_access_log", True)
        try:
            self._config = from_mapping(ServeConfig, own)
        except ConfigError as error:
            raise ConfigError(f"{folder.name}/serving.yaml: {error}") from error
        self._model, self._build = model, build
        self._server: Server | None = None
        self._app: ASGIApp | None = None
        self._reason = "it is not loaded"

    @property
    def memory(self) -> int:
        """Bytes of the weights' files."""
        files = [file for pattern in _WEIGHTS for file in self._model.glob(pattern)]
        if is_gguf(self._model):
            files = [self._model]
        return sum(file.stat().st_size for file in files)

    def ready(self) -> bool:
        """Whether requests are taken now."""
        return self._server is not None and not self.reason()

    def reason(self) -> str:
        """Why they are not."""
        if self._server is None:
            return self._reason
        try:
            self._server.require_ready()
        except ApiError as error:
            return "" if error.status_code == 429 else error.message
        return ""

    async def start(self) -> None:
        """Load the weights, compile every step.

        Raises:
          FornaxError: the model cannot be loaded or served.
        """
        if not self._model.is_dir() and not is_gguf(self._model):
            raise ConfigError(
                f"{self._model} is neither a folder nor a GGUF file; give the model's path under "
                "`model`"
            )
        model = str(self._model)
        metrics = engine_metrics(model, self._config)
        engine = await asyncio.to_thread(self._build, model, self._config, metrics)
        server = create_server(engine, self._config.server(), model=model, metrics=metrics)
        engine.start()
        try:
            await _compiled(engine)
            for module in self._config.lora_modules:
                name, _, path = module.partition("=")
                await engine.add_lora(name, path)
        except BaseException:
            await asyncio.to_thread(engine.shutdown)
            await asyncio.to_thread(metrics.close)
            raise
        self._app = asgi_app(create_app(server))
        self._server = server

    async def stop(self, drain_seconds: float) -> None:
        """Take nothing new, answer what runs, give the engine back."""
        server, self._app = self._server, None
        if server is None:
            return
        server.stopping = True
        end = time.monotonic() + drain_seconds
        # A request that is admitted is not in the engine yet while its text is encoded.
        while server.concurrency.running or server.engine.num_unfinished:
            if time.monotonic() >= end:
                break
            await asyncio.sleep(_POLL)
        self._server, self._reason = None, "it was unloaded"
        await asyncio.to_thread(server.engine.shutdown)
        await asyncio.to_thread(server.metrics.close)

    def inputs(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        """Those of Triton's vLLM backend."""
        return INPUTS

    def outputs(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        """Those of Triton's vLLM backend."""
        return OUTPUTS

    def config(self) -> Mapping[str, object]:
        """The configuration, as Triton's clients read it; all inputs but the text are optional."""
        inputs = [
            {**_described(name, tensor), "optional": name != "text_input"}
            for name, tensor in INPUTS.items()
        ]
        return {
            "name": self.name,
            "platform": self.platform,
            "backend": "fornax_llm",
            "max_batch_size": 0,
            "input": inputs,
            "output": [_described(name, tensor) for name, tensor in OUTPUTS.items()],
            "model_transaction_policy": {"decoupled": True},
        }

    def collect(self) -> Iterable[Metric]:
        """The engine's metrics, under vLLM's names."""
        if self._server is None:
            return []
        if not self._server.engine.num_unfinished:
            self._server.metrics.idle()
        return self._server.metrics.collect()

    def routes(self) -> Mapping[str, ASGIApp]:
        """OpenAI's routes."""
        return dict.fromkeys(("/v1", "/tokenize", "/detokenize"), self._route)

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._app is not None:
            await self._app(scope, receive, send)
            return
        error = ApiError(503, f"{self.name} is not ready: {self.reason()}", code="not_ready")
        await error.response()(scope, receive, send)

    async def infer(self, request: V2Request) -> Mapping[str, np.ndarray]:
        """Complete the prompts of a V2 request.

        Raises:
          ServingError: it is refused, or the engine ended.
        """
        with _serving_errors():
            server, query = self._read(request, in_pieces=False)
            with server.concurrency.admitted():
                texts = await _complete(server, query, request)
        return {"text_output": bytes_array(texts)}

    async def stream(
        self, request: V2Request
    ) -> AsyncGenerator[tuple[Mapping[str, np.ndarray], bool]]:
        """What is new of a prompt's completions, as it is made; whole without `stream`.

        A piece has a text for each of `n` completions, empty where nothing is new of one.

        Raises:
          ServingError: it is refused, or the engine ended.
        """
        with _serving_errors():
            server, query = self._read(request, in_pieces=True)
            with server.concurrency.admitted():
                if not query.stream:
                    texts = await _complete(server, query, request)
                    yield {"text_output": bytes_array(texts)}, True
                    return
                new = _stream_texts(server, query, request)
                async with contextlib.aclosing(new):
                    async for texts, last in new:
                        yield {"text_output": bytes_array(texts)}, last

    def _read(self, request: V2Request, *, in_pieces: bool) -> tuple[Server, GenerateRequest]:
        """What answers, and what is asked for."""
        server = self._server
        if server is None:
            raise ServingError(ServingCode.UNAVAILABLE, f"{self.name} is not ready")
        server.require_ready()
        limits = server.config.request_limits
        fields = request.inputs.get("sampling_parameters")
        if fields is not None and fields.dtype == np.object_:
            for text in fields.ravel():
                limits.check_json(bytes(text), server.engine.max_model_len)
        defaults = {name: value for name, value in server.defaults.items() if value is not None}
        query = read_request(request.inputs, request.parameters, defaults, in_pieces=in_pieces)
        limits.check(query.params, len(query.prompts))
        return server, query


async def _complete(server: Server, query: GenerateRequest, request: V2Request) -> list[str]:
    """The completions of each prompt."""
    encoded = await _encode(server, query)
    tasks = [
        asyncio.ensure_future(_last(_outputs(server, query, prompt, tokens, request)))
        for prompt, tokens in zip(query.prompts, encoded, strict=True)
    ]
    try:
        done = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    return [
        (prompt if query.echo else "") + completion.text
        for prompt, output in zip(query.prompts, done, strict=True)
        for completion in output.outputs
    ]


async def _stream_texts(
    server: Server, query: GenerateRequest, request: V2Request
) -> AsyncGenerator[tuple[list[str], bool]]:
    """What is new of each of the one prompt's completions, and whether it is the last."""
    [tokens] = await _encode(server, query)
    outputs = _outputs(server, query, query.prompts[0], tokens, request)
    async with contextlib.aclosing(outputs):
        async for output in outputs:
            texts = [""] * query.params.n
            for completion in output.outputs:
                texts[completion.index] = completion.text
            if output.finished or any(texts):
                yield texts, output.finished


async def _encode(server: Server, query: GenerateRequest) -> list[list[int]]:
    encode = server.encoder.encode
    encoded = [await encode(prompt, add_special_tokens=True) for prompt in query.prompts]
    server.config.request_limits.check_prompts(sum(map(len, encoded)), query.params.n)
    return encoded


async def _outputs(
    server: Server, query: GenerateRequest, prompt: str, tokens: list[int], request: V2Request
) -> AsyncGenerator[RequestOutput]:
    """The engine's outputs; closing them aborts."""
    room = server.encoder.max_new_tokens(tokens, query.params.max_tokens)
    outputs = server.engine.generate(
        tokens,
        dataclasses.replace(query.params, max_tokens=room),
        request_id=server.engine_id(f"v2-{request.request_id or server.names[0]}"),
        priority=request.priority,
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
def _serving_errors() -> Iterator[None]:
    """Raise the model server's errors for those of the engine and its server.

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


async def _compiled(engine: AsyncEngine) -> None:
    while not engine.readiness().ready:
        if (error := engine.error()) is not None:
            raise EngineError(f"the engine died while it compiled: {error}")
        await asyncio.sleep(_POLL)


def _described(name: str, tensor: tuple[str, tuple[int, ...]]) -> dict[str, object]:
    kind = {"BYTES": "TYPE_STRING"}.get(tensor[0], f"TYPE_{tensor[0]}")
    return {"name": name, "data_type": kind, "dims": list(tensor[1])}
