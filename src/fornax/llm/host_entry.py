"""A language model among the models of `fornax host`: OpenAI's routes and V2's, one engine.

A folder of the repository with a `serving.yaml` that says `type: llm`, `model: PATH` (default: the
folder itself) and any key of `fornax serve` but those about listening. The model server knows this
class by its methods alone, and the command connects the two.
"""

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fornax.config import ConfigError, EngineError, ServingCode, ServingError, from_mapping
from fornax.llm.host_answers import pieces, told, whole
from fornax.llm.host_tensors import INPUTS, OUTPUTS, Asked, bytes_array, read_request
from fornax.llm.server.app import create_app, create_server, guarded
from fornax.llm.server.engine import Engine
from fornax.llm.server.errors import ApiError
from fornax.llm.server.launch import ServeConfig, build_observed, engine_metrics
from fornax.llm.server.metrics import Metrics
from fornax.llm.server.state import Server
from fornax.llm.stats import Observer

__all__ = ["LLMEntry"]

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


class LLMEntry:
    """One language model; see `fornax.serving.entry.StreamingEntry` for its methods."""

    platform = "fornax_llm"

    def __init__(
        self,
        name: str,
        folder: Path,
        settings: Mapping[str, Any],
        build: Callable[[str, ServeConfig, Observer], Engine] = build_observed,
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
        self._metrics: Metrics | None = None
        self._server: Server | None = None
        self._app: Any = None
        self._reason = "it is not loaded"
        self._ids = (f"v2-{name}-{count}" for count in itertools.count())

    @property
    def memory(self) -> int:
        """Bytes of the weights' files."""
        files = (file for pattern in _WEIGHTS for file in self._model.glob(pattern))
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
        if not self._model.is_dir():
            raise ConfigError(f"{self._model} is no folder; give the model's path under `model`")
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
            raise
        self._app = guarded(create_app(server))
        self._server, self._metrics = server, metrics

    async def stop(self, drain_seconds: float) -> None:
        """Take nothing new, answer what runs, give the engine back."""
        server, self._app = self._server, None
        if server is None:
            return
        server.stopping = True
        end = time.monotonic() + drain_seconds
        while server.engine.num_unfinished and time.monotonic() < end:
            await asyncio.sleep(_POLL)
        self._server, self._metrics, self._reason = None, None, "it was unloaded"
        await asyncio.to_thread(server.engine.shutdown)

    def inputs(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        """Those of Triton's vLLM backend."""
        return INPUTS

    def outputs(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        """Those of Triton's vLLM backend."""
        return OUTPUTS

    def config(self) -> Mapping[str, Any]:
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

    def collect(self) -> Iterable[Any]:
        """The engine's metrics, under vLLM's names."""
        if self._server is None or self._metrics is None:
            return []
        if not self._server.engine.num_unfinished:
            self._metrics.idle()
        return self._metrics.collect()

    def routes(self) -> Mapping[str, Any]:
        """OpenAI's routes."""
        return dict.fromkeys(("/v1", "/tokenize", "/detokenize"), self._route)

    async def _route(self, scope: Any, receive: Any, send: Any) -> None:
        if self._app is not None:
            await self._app(scope, receive, send)
            return
        error = ApiError(503, f"{self.name} is not ready: {self.reason()}", code="not_ready")
        await error.response()(scope, receive, send)

    async def infer(self, request: Any) -> Mapping[str, np.ndarray]:
        """Complete the prompts of a V2 request.

        Raises:
          ServingError: it is refused, or the engine ended.
        """
        with told():
            server, asked = self._read(request, in_pieces=False)
            with server.load.admitted():
                texts = await whole(server, asked, request.priority, self._ids)
        return {"text_output": bytes_array(texts)}

    async def stream(self, request: Any) -> AsyncGenerator[tuple[Mapping[str, np.ndarray], bool]]:
        """What is new of a prompt's completions, as it is made; whole without `stream`.

        A piece has a text for each of `n` completions, empty where nothing is new of one.

        Raises:
          ServingError: it is refused, or the engine ended.
        """
        with told():
            server, asked = self._read(request, in_pieces=True)
            with server.load.admitted():
                if not asked.stream:
                    texts = await whole(server, asked, request.priority, self._ids)
                    yield {"text_output": bytes_array(texts)}, True
                    return
                new = pieces(server, asked, request.priority, self._ids)
                async with contextlib.aclosing(new):
                    async for texts, last in new:
                        yield {"text_output": bytes_array(texts)}, last

    def _read(self, request: Any, *, in_pieces: bool) -> tuple[Server, Asked]:
        """What answers, and what is asked for."""
        server = self._server
        if server is None:
            raise ServingError(ServingCode.UNAVAILABLE, f"{self.name} is not ready")
        server.require_ready()
        limits = server.config.request_limits
        for text in _objects(request.inputs.get("sampling_parameters")):
            limits.check_json(bytes(text), server.engine.max_model_len)
        defaults = _defaults(server.defaults)
        asked = read_request(request.inputs, request.parameters, defaults, in_pieces=in_pieces)
        limits.check(asked.params, len(asked.prompts))
        return server, asked


async def _compiled(engine: Engine) -> None:
    while not engine.readiness().ready:
        if (error := engine.error()) is not None:
            raise EngineError(f"the engine died while it compiled: {error}")
        await asyncio.sleep(_POLL)


def _objects(array: np.ndarray | None) -> list[Any]:
    return [] if array is None or array.dtype != np.object_ else list(array.ravel())


def _defaults(model: Mapping[str, Any]) -> dict[str, Any]:
    """The model's own defaults of sampling, as far as the config lets them hold."""
    return {name: value for name, value in model.items() if value is not None}


def _described(name: str, tensor: tuple[str, tuple[int, ...]]) -> dict[str, Any]:
    kind = {"BYTES": "TYPE_STRING"}.get(tensor[0], f"TYPE_{tensor[0]}")
    return {"name": name, "data_type": kind, "dims": list(tensor[1])}
