"""When requests are sent: all at once, at a rate, on a ramp, or at recorded times."""

import math
from collections.abc import Sequence

import numpy as np

from fornax.llm.bench.config import BenchConfig
from fornax.llm.bench.workload import Request

__all__ = ["send_times"]


def send_times(config: BenchConfig, requests: Sequence[Request]) -> list[float]:
    """Seconds after the start at which each request is to be sent, in order.

    Intervals follow a gamma distribution of shape `burstiness`: an exponential one at 1. At a
    constant rate the times are scaled so that the last request goes out when that rate says.
    """
    if config.follows_timestamps:
        first = min(request.timestamp for request in requests)
        return [request.timestamp - first for request in requests]
    rates = _rates(config, len(requests))
    if math.isinf(rates[0]):
        return [0.0] * len(requests)
    if math.isinf(config.burstiness):
        intervals = 1 / rates
    else:
        rng = np.random.default_rng([config.seed, 1])
        intervals = rng.gamma(config.burstiness, 1 / (rates * config.burstiness))
    times = np.cumsum(intervals)
    if config.ramp_up_strategy is None:
        times *= len(requests) / config.request_rate / times[-1]
    return times.tolist()


def _rates(config: BenchConfig, count: int) -> np.ndarray:
    """Requests a second at each request, `[count]`."""
    if config.ramp_up_strategy is None:
        return np.full(count, config.request_rate)
    start, end = config.ramp_up_start_rps, config.ramp_up_end_rps
    assert start is not None  # the config checks both
    assert end is not None
    progress = np.arange(count) / max(count - 1, 1)
    if config.ramp_up_strategy == "linear":
        return start + (end - start) * progress
    return start * (end / start) ** progress
