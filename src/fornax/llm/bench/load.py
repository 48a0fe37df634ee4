"""The run: requests sent when their time comes, at most so many in flight, and their outcomes."""

import asyncio
import json
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import uvloop

from fornax.config import ConfigError, EngineError
from fornax.config.environment import openai_api_key
from fornax.llm.bench.arrivals import send_times
from fornax.llm.bench.config import BenchConfig
from fornax.llm.bench.connection import Exchange, Pool, request_bytes
from fornax.llm.bench.outcome import Outcome, read_outcome
from fornax.llm.bench.server import find_model, wait_until_ready
from fornax.llm.bench.vocabulary import LocalVocabulary, ServedVocabulary
from fornax.llm.bench.workload import Request, make_requests

__all__ = ["BenchRun", "bench"]

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


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRun:
    """A finished run."""

    model: str
    outcomes: list[Outcome]
    """Of each request, in the order of sending."""
    seconds: float
    """From the first sending to the last answer."""


def bench(config: BenchConfig, progress: Callable[[int, int], None] | None = None) -> BenchRun:
    """Put the load on the server.

    Args:
        progress: called with the requests answered and those in all.

    Raises EngineError when there is no server, it is not ready, or no request succeeded.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_bench(config, progress))


async def _bench(config: BenchConfig, progress: Callable[[int, int], None] | None) -> BenchRun:
    pool = Pool(config.url, verify=not config.insecure)
    headers = _headers(config)
    try:
        if config.ready_check_timeout_sec:
            await wait_until_ready(pool, config.url, headers, config.ready_check_timeout_sec)
        model = await find_model(pool, config.url, headers, config.model)
        if config.tokenizer is not None:
            vocabulary = LocalVocabulary(config.tokenizer)
        else:
            vocabulary = ServedVocabulary(pool, config.url, headers, model.name)
            await vocabulary.load(config.seed)
        requests = await make_requests(config, vocabulary, model.context)
        wires = _wires(config, requests, config.served_model_name or model.name, headers)
        await _warm_up(config, pool, wires)
        return await _run(config, pool, model.name, requests, wires, progress)
    finally:
        await pool.close()


def _headers(config: BenchConfig) -> dict[str, str]:
    key = openai_api_key()
    return {
        "Content-Type": "application/json",
        **({"Authorization": f"Bearer {key}"} if key else {}),
        **config.headers(),
    }


def _wires(
    config: BenchConfig, requests: Sequence[Request], model: str, headers: dict[str, str]
) -> list[bytes]:
    """Every request as bytes, made before the clock runs."""
    names = _models(config, model, len(requests))
    prefix = config.request_id_prefix
    prefix = f"bench-{uuid.uuid4().hex[:8]}-" if prefix is None else prefix
    return [
        request_bytes(
            "POST",
            config.url + config.path,
            headers={**headers, "x-request-id": f"{prefix}{number}"},
            body=json.dumps(_body(config, request, name)).encode(),
        )
        for number, (request, name) in enumerate(zip(requests, names, strict=True))
    ]


def _models(config: BenchConfig, model: str, count: int) -> list[str]:
    adapters = config.lora_modules
    if not adapters:
        return [model] * count
    if config.lora_assignment == "round-robin":
        return [adapters[number % len(adapters)] for number in range(count)]
    return np.random.default_rng([config.seed, 6]).choice(adapters, count).tolist()


def _body(config: BenchConfig, request: Request, model: str) -> dict[str, Any]:
    body: dict[str, Any] = {
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


def _extra(config: BenchConfig) -> dict[str, Any]:
    try:
        extra = json.loads(config.extra_body or "{}")
    except ValueError as error:
        raise ConfigError(f"extra_body is not JSON: {error}") from None
    if not isinstance(extra, dict):
        raise ConfigError(f"extra_body={config.extra_body} must be a JSON object")
    return extra


async def _warm_up(config: BenchConfig, pool: Pool, wires: Sequence[bytes]) -> None:
    chosen = [wires[number % len(wires)] for number in range(config.num_warmups)]
    places = asyncio.Semaphore(config.max_concurrency or max(1, len(chosen)))

    async def one(wire: bytes) -> Outcome:
        async with places:
            return read_outcome(await _exchange(pool, wire), prompt_tokens=0)

    for outcome in await asyncio.gather(*map(one, chosen)):
        if outcome.error:
            raise EngineError(f"a warm-up request failed: {outcome.error}")


async def _run(
    config: BenchConfig,
    pool: Pool,
    model: str,
    requests: Sequence[Request],
    wires: Sequence[bytes],
    progress: Callable[[int, int], None] | None,
) -> BenchRun:
    """Send every request at its time and wait for all answers; read them afterwards."""
    places = asyncio.Semaphore(config.max_concurrency or len(wires))
    answered = 0

    async def one(wire: bytes, due: float) -> tuple[Exchange | OSError, float]:
        nonlocal answered
        delay = due - time.perf_counter()
        if delay > 0:
            await asyncio.sleep(delay)
        arrived = time.perf_counter()
        async with places:
            queued = time.perf_counter() - arrived
            try:
                exchange = await _exchange(pool, wire)
            except OSError as error:
                return error, queued
            finally:
                answered += 1
                if progress is not None:
                    progress(answered, len(wires))
            return exchange, queued

    start = time.perf_counter()
    dues = [start + seconds for seconds in send_times(config, requests)]
    answers = await asyncio.gather(*map(one, wires, dues))
    seconds = time.perf_counter() - start
    outcomes = [
        _outcome(answer, request, queued, start)
        for (answer, queued), request in zip(answers, requests, strict=True)
    ]
    if all(outcome.error for outcome in outcomes):
        raise EngineError(f"none of {len(outcomes)} requests succeeded: {outcomes[0].error}")
    return BenchRun(model=model, outcomes=outcomes, seconds=seconds)


async def _exchange(pool: Pool, wire: bytes) -> Exchange:
    async with asyncio.timeout(_TIMEOUT_S):
        return await pool.exchange(wire)


def _outcome(answer: Exchange | OSError, request: Request, queued: float, start: float) -> Outcome:
    if isinstance(answer, OSError):
        return Outcome(started=start, queued=queued, error=str(answer) or type(answer).__name__)
    return read_outcome(answer, prompt_tokens=request.prompt_tokens, queued=queued)
