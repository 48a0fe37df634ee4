"""The points of a serving plan: batches, contexts and prompts, with what binds each."""

from collections.abc import Sequence

from fornax.plan.serving.engine import Engine
from fornax.plan.serving.memory import cache_holds
from fornax.plan.serving.times import StepTimes
from fornax.plan.serving_facts import DecodeLatency, LargestBatch, Origin, PromptLatency

_BATCHES = (1, 8, 32, 128)


def decode_latencies(
    engine: Engine, expected: StepTimes, least: StepTimes, contexts: Sequence[int]
) -> list[DecodeLatency]:
    """For each context the batches 1, 8, 32, … up to the largest that the cache holds."""
    found = []
    for context in contexts:
        most = cache_holds(engine, context)
        for batch in sorted({batch for batch in _BATCHES if batch < most} | {most} - {0}):
            step = expected.decode(batch, context)
            found.append(
                DecodeLatency(
                    batch=batch,
                    context=context,
                    seconds=step.seconds,
                    least_seconds=least.decode(batch, context).seconds,
                    weights_seconds=step.weights,
                    cache_seconds=step.cache,
                    compute_seconds=step.compute,
                    exchange_seconds=step.exchange,
                    sampling_seconds=step.sampling,
                    bound=step.bound,
                    tokens_per_second_per_chip=batch / step.seconds / engine.chips,
                    origin=_origin(step.compiled),
                )
            )
    return found


def prompt_latencies(
    engine: Engine, expected: StepTimes, least: StepTimes, lengths: Sequence[int]
) -> list[PromptLatency]:
    """The time to a first token of prompts of these lengths."""
    found = []
    for tokens in lengths:
        step, count = expected.prompt(tokens)
        found.append(
            PromptLatency(
                tokens=tokens,
                steps=count,
                seconds=step.seconds,
                least_seconds=least.prompt(tokens)[0].seconds,
                bound=step.bound,
                tokens_per_second_per_chip=tokens / step.seconds / engine.chips,
                origin=_origin(step.compiled),
            )
        )
    return found


def largest_batches(
    engine: Engine, expected: StepTimes, contexts: Sequence[int], limit: float
) -> list[LargestBatch]:
    """For each context the largest batch whose tokens are predicted to come within `limit`."""
    found = []
    for context in contexts:
        most = cache_holds(engine, context)
        times = {n: expected.decode(n, context).seconds for n in range(1, most + 1)}
        batch = max((n for n, seconds in times.items() if seconds <= limit), default=0)
        if batch < most or not most:
            by = "latency" if most else "cache"
        else:
            by = "max_num_seqs" if most == engine.limits.max_num_seqs else "cache"
        seconds = times.get(batch, times.get(1, 0.0))
        found.append(
            LargestBatch(
                context=context,
                batch=batch,
                seconds=seconds,
                tokens_per_second_per_chip=batch / seconds / engine.chips if seconds else 0.0,
                limited_by=by,
            )
        )
    return found


def _origin(compiled: bool) -> Origin:
    return "compiled" if compiled else "predicted"
