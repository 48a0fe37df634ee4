"""The result of a run: counts, rates and latencies, defined as `vllm bench serve` defines them.

Milliseconds where a name ends in `_ms`. TTFT: sending to first token. TPOT: mean time of a token
after the first. ITL: time between consecutive pieces. E2EL: sending to last token. Times start when
a request is sent, after its wait for a place among those in flight (`client_queue_time`).
"""

import datetime
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from fornax.bench.load import latency_statistics
from fornax.bench.openai.config import BenchConfig
from fornax.bench.openai.outcome import Outcome

__all__ = ["Result", "goodput", "report_lines", "summarise", "write_result"]

Result = dict[str, float | None]
"""Every figure of a run by its name in the JSON; None where none was asked for."""

_TITLES = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
    "client_queue_time": ("queue time", "Wait at the Client"),
    "e2el_including_client_queue": ("E2EL incl. queue", "Latency with the Wait"),
}
_COSTS = {
    "cost_usd": "Cost of the run (US$):",
    "cost_per_million_output_tokens_usd": "Cost per 1M output tokens (US$):",
    "cost_per_million_tokens_usd": "Cost per 1M tokens, input too (US$):",
}
_WIDTH = 52
_SLO_TIMES: dict[str, Callable[[Outcome], float]] = {
    "ttft": lambda outcome: outcome.first_token,
    "tpot": lambda outcome: outcome.per_token or 0.0,
    "e2el": lambda outcome: outcome.latency,
}
"""Seconds that an objective bounds; one token has no time per token."""


def summarise(config: BenchConfig, outcomes: Sequence[Outcome], seconds: float) -> Result:
    """Return the result of a run.

    Args:
        outcomes: of every request.
        seconds: from the first sending to the last answer.
    """
    done = [outcome for outcome in outcomes if not outcome.error]
    inputs = sum(outcome.prompt_tokens for outcome in done)
    outputs = sum(outcome.output_tokens for outcome in done)
    objectives = config.objectives()
    result: Result = {
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
    if config.price is not None:
        cost = config.price * config.chips * seconds / 3600
        result |= {
            "cost_usd": cost,
            "cost_per_million_output_tokens_usd": cost / outputs * 1e6 if outputs else None,
            "cost_per_million_tokens_usd": (
                cost / (inputs + outputs) * 1e6 if inputs + outputs else None
            ),
        }
    samples = _samples(config, done)
    for name in config.metrics:
        if name in samples:
            found = latency_statistics(samples[name], config.percentiles)
            del found["max"]
            result |= {f"{key}_{name}_ms": value for key, value in found.items()}
    return result


def goodput(done: Sequence[Outcome], objectives: Mapping[str, float]) -> int:
    """Count the requests within every objective, in seconds."""
    return sum(
        all(_SLO_TIMES[name](outcome) <= limit for name, limit in objectives.items())
        for outcome in done
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


def report_lines(config: BenchConfig, result: Mapping[str, float | None]) -> Iterator[str]:
    """The report as lines of text."""
    yield " Serving Benchmark Result ".center(_WIDTH, "=")
    yield _line("Successful requests:", result["completed"])
    yield _line("Failed requests:", result["failed"])
    if config.max_concurrency is not None:
        yield _line("Maximum request concurrency:", config.max_concurrency)
    if not math.isinf(config.request_rate):
        yield _line("Request rate configured (RPS):", config.request_rate)
    yield _line("Benchmark duration (s):", result["duration"])
    yield _line("Total input tokens:", result["total_input_tokens"])
    yield _line("Total generated tokens:", result["total_output_tokens"])
    yield _line("Request throughput (req/s):", result["request_throughput"])
    if result["request_goodput"] is not None:
        yield _line("Request goodput (req/s):", result["request_goodput"])
    yield _line("Output token throughput (tok/s):", result["output_throughput"])
    yield _line("Peak output token throughput (tok/s):", result["max_output_tokens_per_s"])
    yield _line("Peak concurrent requests:", result["max_concurrent_requests"])
    yield _line("Total token throughput (tok/s):", result["total_token_throughput"])
    for key, label in _COSTS.items():
        cost = result.get(key)
        if cost is not None:
            yield f"{label:<40} {cost:<10.4g}"
    for name in config.metrics:
        if f"mean_{name}_ms" in result:
            yield from _metric(config, name, result)
    yield "=" * _WIDTH


def _metric(config: BenchConfig, name: str, result: Mapping[str, float | None]) -> Iterator[str]:
    short, title = _TITLES[name]
    yield title.center(_WIDTH, "-")
    yield _line(f"Mean {short} (ms):", result[f"mean_{name}_ms"])
    yield _line(f"Median {short} (ms):", result[f"median_{name}_ms"])
    for percentile in config.percentiles:
        yield _line(f"P{percentile:g} {short} (ms):", result[f"p{percentile:g}_{name}_ms"])


def _line(label: str, value: float | None) -> str:
    return f"{label:<40} {value:<10.2f}" if isinstance(value, float) else f"{label:<40} {value:<10}"


def write_result(
    config: BenchConfig, model: str, result: Mapping[str, float | None], outcomes: Sequence[Outcome]
) -> Path:
    """Write the result as JSON, with the names that `vllm bench serve` uses; return its path."""
    now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    written = {
        "date": now,
        "backend": config.backend,
        "label": config.label,
        "model_id": model,
        "tokenizer_id": str(config.tokenizer or model),
        "num_prompts": config.num_prompts,
        **config.notes(),
        "request_rate": "inf" if math.isinf(config.request_rate) else config.request_rate,
        "burstiness": config.burstiness,
        "max_concurrency": config.max_concurrency,
        **result,
        **(_details(outcomes) if config.save_detailed else {}),
    }
    path = config.result_dir / (config.result_filename or _file_name(config, model, now))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(written) + "\n", encoding="utf-8")
    return path


def _details(outcomes: Sequence[Outcome]) -> dict[str, list[object]]:
    """Times, texts and errors, a column each."""
    columns = {
        "input_lens": "prompt_tokens",
        "output_lens": "output_tokens",
        "ttfts": "first_token",
        "itls": "gaps",
        "latencies": "latency",
        "start_times": "started",
        "queue_times": "queued",
        "generated_texts": "text",
        "errors": "error",
    }
    return {key: [getattr(o, name) for o in outcomes] for key, name in columns.items()}


def _file_name(config: BenchConfig, model: str, now: str) -> str:
    if config.ramp_up_strategy is not None:
        ends = f"{config.ramp_up_start_rps:g}qps-{config.ramp_up_end_rps:g}qps"
        rate = f"ramp-up-{config.ramp_up_strategy}-{ends}"
    else:
        rate = f"{config.request_rate}qps"
    places = f"-concurrency{config.max_concurrency}" if config.max_concurrency else ""
    return f"{config.label or config.backend}-{rate}{places}-{model.split('/')[-1]}-{now}.json"
