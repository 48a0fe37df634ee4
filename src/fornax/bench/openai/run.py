"""One run: requests sent at their times, at most this many in flight, and what became of each."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import uvloop

from fornax.bench.connection import Exchange
from fornax.bench.load import arrival_times, run_load
from fornax.bench.openai.config import BenchConfig
from fornax.bench.openai.outcome import Outcome, read_outcome
from fornax.bench.openai.prompts import LocalVocabulary, Request, ServedVocabulary, make_requests
from fornax.bench.openai.target import Target
from fornax.config import EngineError

__all__ = ["BenchRun", "bench"]


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
    return uvloop.run(_bench(config, progress))


async def _bench(config: BenchConfig, progress: Callable[[int, int], None] | None) -> BenchRun:
    target = Target(config)
    try:
        if config.ready_check_timeout_sec:
            await target.wait_until_ready(config.ready_check_timeout_sec)
        model = await target.find_model()
        if config.tokenizer is not None:
            vocabulary = LocalVocabulary(config.tokenizer)
        else:
            vocabulary = await ServedVocabulary.load(target, model.name, config.seed)
        requests = await make_requests(config, vocabulary, model.context)
        encoded = target.encode(requests, model.name)
        await _warm_up(config, target, encoded)
        outcomes, seconds = await _run(config, target, requests, encoded, progress)
    finally:
        await target.close()
    if all(outcome.error for outcome in outcomes):
        raise EngineError(f"none of {len(outcomes)} requests succeeded: {outcomes[0].error}")
    return BenchRun(model=model.name, outcomes=outcomes, seconds=seconds)


async def _warm_up(config: BenchConfig, target: Target, encoded: Sequence[bytes]) -> None:
    async def send(request: bytes, _: float) -> None:
        outcome = read_outcome(await target.send(request), prompt_tokens=0)
        if outcome.error:
            raise EngineError(f"a warm-up request failed: {outcome.error}")

    chosen = [(0.0, encoded[number % len(encoded)]) for number in range(config.num_warmups)]
    await run_load(chosen, send, config.max_concurrency or len(chosen))


def _times(config: BenchConfig, requests: Sequence[Request]) -> list[float]:
    """Seconds after the start at which each request is to be sent."""
    if config.follows_timestamps:
        first = min(request.timestamp for request in requests)
        return [request.timestamp - first for request in requests]
    return arrival_times(
        len(requests),
        rate=config.request_rate,
        ramp=config.ramp,
        burstiness=config.burstiness,
        seed=config.seed,
    )


async def _run(
    config: BenchConfig,
    target: Target,
    requests: Sequence[Request],
    encoded: Sequence[bytes],
    progress: Callable[[int, int], None] | None,
) -> tuple[list[Outcome], float]:
    """Send every request at its time and wait for all answers, which are read afterwards."""
    answers: dict[int, tuple[Exchange | OSError, float]] = {}

    async def send(number: int, queued: float) -> None:
        try:
            answers[number] = await target.send(encoded[number]), queued
        except OSError as error:
            answers[number] = error, queued
        if progress is not None:
            progress(len(answers), len(encoded))

    start = time.perf_counter()
    arrivals = [(start + due, number) for number, due in enumerate(_times(config, requests))]
    await run_load(arrivals, send, config.max_concurrency or len(encoded))
    seconds = time.perf_counter() - start
    outcomes = []
    for number, request in enumerate(requests):
        answer, queued = answers[number]
        if isinstance(answer, OSError):
            why = str(answer) or type(answer).__name__
            outcomes.append(Outcome(started=start, queued=queued, error=why))
        else:
            tokens = request.prompt_tokens
            outcomes.append(read_outcome(answer, prompt_tokens=tokens, queued=queued))
    return outcomes, seconds
