"""The points of a serving plan: batches, contexts and prompts, with what binds each."""

from collections.abc import Sequence

from fornax.plan.serving.data import Bound, DecodePoint, LargestBatch, Origin, PromptPoint
from fornax.plan.serving.latency import Clock, Step
from fornax.plan.serving.layout import Engine
from fornax.plan.serving.memory import cache_holds

__all__ = ["Clocks", "contexts_of", "decode_points", "largest_batches", "prompt_points"]

_BATCHES = (1, 8, 32, 128)


class Clocks:
    """Two clocks of one engine: at published rates, and at those that programs reach."""

    def __init__(self, least: Clock, expected: Clock) -> None:
        self.least = least
        self.expected = expected


def contexts_of(engine: Engine) -> tuple[int, ...]:
    """Lengths to report: an eighth of the longest sequence, half of it, all of it."""
    longest = engine.limits.max_model_len
    return tuple(sorted({max(1, longest // 8), max(1, longest // 2), longest}))


def decode_points(engine: Engine, clocks: Clocks, contexts: Sequence[int]) -> list[DecodePoint]:
    """For each context the batches 1, 8, 32, … up to the largest that the cache holds."""
    found = []
    for context in contexts:
        most = cache_holds(engine, context)
        batches = sorted({batch for batch in _BATCHES if batch < most} | {most} - {0})
        found += [_decode(engine, clocks, batch, context) for batch in batches]
    return found


def _decode(engine: Engine, clocks: Clocks, batch: int, context: int) -> DecodePoint:
    step = clocks.expected.decode(batch, context)
    return DecodePoint(
        batch=batch,
        context=context,
        seconds=step.seconds,
        least_seconds=clocks.least.decode(batch, context).seconds,
        weights_seconds=step.weights,
        cache_seconds=step.cache,
        compute_seconds=step.compute,
        exchange_seconds=step.exchange,
        sampling_seconds=step.sampling,
        bound=_bound(step),
        tokens_per_second_per_chip=batch / step.seconds / engine.chips,
        origin=_origin(step),
    )


def prompt_points(engine: Engine, clocks: Clocks, lengths: Sequence[int]) -> list[PromptPoint]:
    """The time to a first token of prompts of these lengths."""
    found = []
    for tokens in lengths:
        step, count = clocks.expected.prompt(tokens)
        found.append(
            PromptPoint(
                tokens=tokens,
                steps=count,
                seconds=step.seconds,
                least_seconds=clocks.least.prompt(tokens)[0].seconds,
                bound=_bound(step),
                tokens_per_second_per_chip=tokens / step.seconds / engine.chips,
                origin=_origin(step),
            )
        )
    return found


def largest_batches(
    engine: Engine, clocks: Clocks, contexts: Sequence[int], limit: float
) -> list[LargestBatch]:
    """For each context the largest batch whose tokens are predicted to come within `limit`."""
    found = []
    for context in contexts:
        most = cache_holds(engine, context)
        times = {n: clocks.expected.decode(n, context).seconds for n in range(1, most + 1)}
        quick = [n for n, seconds in times.items() if seconds <= limit]
        batch = max(quick, default=0)
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


def _bound(step: Step) -> Bound:
    parts: dict[Bound, float] = {
        "weights": step.weights,
        "cache": step.cache,
        "compute": step.compute,
        "exchange": step.exchange,
        "sampling": step.sampling,
    }
    return max(parts, key=lambda name: parts[name])


def _origin(step: Step) -> Origin:
    return "compiled" if step.compiled else "predicted"
