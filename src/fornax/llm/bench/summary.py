"""Counts, rates and latencies of a run, defined as `vllm bench serve` defines them.

Milliseconds where a name ends in `_ms`. TTFT: sending to first token. TPOT: mean time of a token
after the first. ITL: time between consecutive pieces. E2EL: sending to last token. Times start when
a request is sent, after its wait for a place among those in flight (`client_queue_time`).
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fornax.llm.bench.config import BenchConfig
from fornax.llm.bench.outcome import Outcome

__all__ = ["goodput", "summarise"]


def summarise(config: BenchConfig, outcomes: Sequence[Outcome], seconds: float) -> dict[str, Any]:
    """Return the result of a run.

    Args:
        outcomes: of every request.
        seconds: from the first sending to the last answer.
    """
    done = [outcome for outcome in outcomes if not outcome.error]
    inputs, outputs = (
        sum(getattr(o, f"{kind}_tokens") for o in done) for kind in ("prompt", "output")
    )
    objectives = config.objectives()
    result: dict[str, Any] = {
        "duration": seconds,
        "completed": len(done),
        "failed": len(outcomes) - len(done),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(done) / seconds,
        "request_goodput": goodput(done, objectives) / seconds if objectives else None,
        "output_throughput": outputs / seconds,
        "total_token_throughput": (inputs + outputs) / seconds,
        "max_output_tokens_per_s": _peak_rate(done),
        "max_concurrent_requests": _peak_requests(done),
    }
    samples = _samples(config, done)
    for name in config.metrics:
        if name in samples:
            result |= _statistics(name, samples[name], config.percentiles)
    return result


def goodput(done: Sequence[Outcome], objectives: Mapping[str, float]) -> int:
    """Count the requests within every objective (seconds); one token has no time per token."""
    times = {
        "ttft": lambda outcome: outcome.first_token,
        "tpot": lambda outcome: outcome.per_token or 0.0,
        "e2el": lambda outcome: outcome.latency,
    }
    return sum(
        all(times[name](outcome) <= limit for name, limit in objectives.items()) for outcome in done
    )


def _samples(config: BenchConfig, done: Sequence[Outcome]) -> dict[str, list[float]]:
    """Seconds of each metric; queue times only where requests could have to wait."""
    samples = {
        "ttft": [outcome.first_token for outcome in done],
        "tpot": [outcome.per_token for outcome in done if outcome.per_token is not None],
        "itl": [gap for outcome in done for gap in outcome.gaps],
        "e2el": [outcome.latency for outcome in done],
    }
    if config.max_concurrency is not None:
        samples["client_queue_time"] = [outcome.queued for outcome in done]
        if not math.isinf(config.request_rate):
            samples["e2el_including_client_queue"] = [o.queued + o.latency for o in done]
    return samples


def _statistics(
    name: str, seconds: Sequence[float], percentiles: Sequence[float]
) -> dict[str, float]:
    values = 1e3 * np.asarray(seconds if len(seconds) else [0.0])
    found = {
        f"mean_{name}_ms": float(values.mean()),
        f"median_{name}_ms": float(np.median(values)),
        f"std_{name}_ms": float(values.std()),
    }
    for percentile in percentiles:
        found[f"p{percentile:g}_{name}_ms"] = float(np.percentile(values, percentile))
    return found


def _peak_rate(done: Sequence[Outcome]) -> float:
    """Most pieces of text in one second, counted from the first sending."""
    if not done:
        return 0.0
    start = min(outcome.started for outcome in done)
    arrivals = np.array([time for outcome in done for time in outcome.arrivals])
    return float(np.bincount((arrivals - start).astype(int)).max())


def _peak_requests(done: Sequence[Outcome]) -> int:
    """Most requests in flight at once."""
    changes = [(outcome.started, 1) for outcome in done]
    changes += [(outcome.started + outcome.latency, -1) for outcome in done]
    return int(np.cumsum([change for _, change in sorted(changes)]).max()) if changes else 0
