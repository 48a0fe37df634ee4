"""The load: when requests are sent, how many at once, and the statistics of their latencies."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeVar

import numpy as np

__all__ = ["arrival_times", "latency_statistics", "run_load"]

_Request = TypeVar("_Request")


def arrival_times(
    count: int,
    *,
    rate: float = math.inf,
    ramp: tuple[str, float, float] | None = None,
    burstiness: float = 1.0,
    seed: int = 0,
) -> list[float]:
    """Seconds after the start at which each of `count` requests is to be sent, in order.

    Intervals follow a gamma distribution of shape `burstiness`: an exponential one at 1. At a
    constant rate the times are scaled so that the last request goes out when that rate says.

    Args:
        rate: requests per second; inf sends all at once.
        ramp: "linear" or "exponential", with the rates at its start and end, in place of `rate`.
    """
    if ramp is None and math.isinf(rate):
        return [0.0] * count
    rates = np.full(count, rate) if ramp is None else _ramp(count, *ramp)
    if math.isinf(burstiness):
        intervals = 1 / rates
    else:
        rng = np.random.default_rng([seed, 1])
        intervals = rng.gamma(burstiness, 1 / (rates * burstiness))
    times = np.cumsum(intervals)
    if ramp is None:
        times *= count / rate / times[-1]
    return times.tolist()


def _ramp(count: int, strategy: str, start: float, end: float) -> np.ndarray:
    """Requests per second at each request, `[count]`."""
    progress = np.arange(count) / max(count - 1, 1)
    if strategy == "linear":
        return start + (end - start) * progress
    return start * (end / start) ** progress


async def run_load(
    arrivals: Iterable[tuple[float, _Request]],
    send: Callable[[_Request, float], Awaitable[None]],
    concurrency: int,
) -> None:
    """Send each request at its time, at most `concurrency` of them in flight.

    Args:
        arrivals: when each request is to be sent by `time.perf_counter()`, in order; asked for the
            next when a client is free, so that it may continue until a time is over.
        send: sends a request and returns when it is answered; its second argument is how many
            seconds the request waited for a free client.
    """
    coming = iter(arrivals)

    async def client() -> None:
        for due, request in coming:
            early = due - time.perf_counter()
            if early > 0:
                await asyncio.sleep(early)
            await send(request, max(0.0, -early))

    await asyncio.gather(*(client() for _ in range(concurrency)))


def latency_statistics(seconds: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    """Mean, median, std, max and percentiles (`p99`) of latencies, in milliseconds; 0 for none."""
    values = 1e3 * np.asarray(seconds if len(seconds) else [0.0])
    found = {
        "mean": values.mean(),
        "median": np.median(values),
        "std": values.std(),
        "max": values.max(),
        **{f"p{percentile:g}": np.percentile(values, percentile) for percentile in percentiles},
    }
    return {name: float(value) for name, value in found.items()}
