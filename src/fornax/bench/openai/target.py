"""The OpenAI-compatible server under load: is it ready, which model has it, requests as bytes."""

import asyncio
import json
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from fornax.bench.connection import Exchange, Pool, request_bytes
from fornax.bench.openai.config import BenchConfig
from fornax.bench.openai.prompts import Request
from fornax.config import ConfigError, EngineError
from fornax.config.environment import openai_api_key
from fornax.serving.client import tls_context

__all__ = ["Model", "Target"]

_PAUSE_S = 0.5
_TIMEOUT_S = 6 * 3600
_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
)


@dataclass(frozen=True, slots=True)
class Model:
    """A model that a server has."""

    name: str
    context: int | None
    """Tokens it can hold, where the server says it."""


class Target:
    """The server that a config names."""

    def __init__(self, config: BenchConfig) -> None:
        self.url = config.url
        self._config = config
        key = openai_api_key()
        self._headers = {
            "Content-Type": "application/json",
            **({"Authorization": f"Bearer {key}"} if key else {}),
            **config.headers(),
        }
        parts = urlsplit(config.url)
        secure = parts.scheme == "https"
        self._pool = Pool(
            parts.hostname or "127.0.0.1",
            parts.port or (443 if secure else 80),
            timeout=_TIMEOUT_S,
            tls=tls_context(None, config.insecure) if secure else None,
        )

    async def close(self) -> None:
        """Close every connection."""
        await self._pool.close()

    async def send(self, request: bytes) -> Exchange:
        """Send a request and wait for its whole answer. Raises OSError when there is none."""
        return await self._pool.exchange(request)

    async def ask(self, path: str, fields: Mapping[str, object] | None = None) -> Exchange:
        """GET a path, or POST JSON fields to it. Raises OSError when nothing answers."""
        method, body = ("GET", b"") if fields is None else ("POST", json.dumps(fields).encode())
        return await self._pool.exchange(
            request_bytes(method, self.url + path, headers=self._headers, body=body)
        )

    async def wait_until_ready(self, timeout_s: float) -> None:
        """Wait until the server takes requests: /ready, or /health where there is none.

        Raises EngineError when that takes longer than `timeout_s`.
        """
        end = time.monotonic() + timeout_s
        while True:
            try:
                status = (await self.ask("/ready")).status
                if status == 404:
                    status = (await self.ask("/health")).status
                if status == 200:
                    return
                said = f"answers with status {status}"
            except OSError as error:
                said = f"cannot be reached ({error})"
            if time.monotonic() > end:
                raise EngineError(
                    f"the server at {self.url} {said} after {timeout_s:g} s; start it with fornax "
                    "serve, or raise ready_check_timeout_sec"
                )
            await asyncio.sleep(_PAUSE_S)

    async def find_model(self) -> Model:
        """Return the model that the config names, or the first that the server lists.

        Raises EngineError when there is no server, or it lists no model and none is named.
        """
        try:
            answer = await self.ask("/v1/models")
        except OSError as error:
            raise EngineError(
                f"no server answers at {self.url} ({error}); start one with fornax serve, or name "
                "another with --base-url"
            ) from error
        name = self._config.model
        chosen = next((card for card in _cards(answer) if name in (None, card["id"])), None)
        if chosen is not None:
            return Model(chosen["id"], chosen.get("max_model_len"))
        if name is not None:
            return Model(name, None)
        if answer.status == 401:
            raise EngineError(
                f"{self.url} requires a key; set OPENAI_API_KEY, or --header Authorization=…"
            )
        raise EngineError(
            f"{self.url}/v1/models, status {answer.status}, lists no model; name one with --model"
        )

    def encode(self, requests: Sequence[Request], model: str) -> list[bytes]:
        """Every request as bytes, made before the clock runs."""
        names = _models(self._config, self._config.served_model_name or model, len(requests))
        prefix = self._config.request_id_prefix
        prefix = f"bench-{uuid.uuid4().hex[:8]}-" if prefix is None else prefix
        return [
            request_bytes(
                "POST",
                self.url + self._config.path,
                headers={**self._headers, "x-request-id": f"{prefix}{number}"},
                body=json.dumps(_body(self._config, request, name)).encode(),
            )
            for number, (request, name) in enumerate(zip(requests, names, strict=True))
        ]


def _cards(answer: Exchange) -> list[dict[str, Any]]:
    try:
        return [card for card in json.loads(answer.body)["data"] if "id" in card]
    except (ValueError, LookupError, TypeError):
        return []


def _models(config: BenchConfig, model: str, count: int) -> list[str]:
    adapters = config.lora_modules
    if not adapters:
        return [model] * count
    if config.lora_assignment == "round-robin":
        return [adapters[number % len(adapters)] for number in range(count)]
    return np.random.default_rng([config.seed, 6]).choice(adapters, count).tolist()


def _body(config: BenchConfig, request: Request, model: str) -> dict[str, object]:
    body: dict[str, object] = {
        "model": model,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if config.chat:
        body["messages"] = [{"role": "user", "content": request.prompt}]
        body["max_completion_tokens"] = request.output_tokens
        if config.logprobs is not None:
            body |= {"logprobs": True, "top_logprobs": config.logprobs}
    else:
        body["prompt"] = request.prompt
        body["max_tokens"] = request.output_tokens
        if config.logprobs is not None:
            body["logprobs"] = config.logprobs
    if config.ignore_eos:
        body["ignore_eos"] = True
    chosen = {name: getattr(config, name) for name in _SAMPLING}
    body |= {name: value for name, value in chosen.items() if value is not None}
    return body | _extra(config)


def _extra(config: BenchConfig) -> dict[str, object]:
    try:
        extra = json.loads(config.extra_body or "{}")
    except ValueError as error:
        raise ConfigError(f"extra_body is not JSON: {error}") from None
    if not isinstance(extra, dict):
        raise ConfigError(f"extra_body={config.extra_body} must be a JSON object")
    return extra
