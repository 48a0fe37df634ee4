"""The result of a run, as lines for a person and as the JSON file that scripts read."""

import datetime
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fornax.llm.bench.config import BenchConfig
from fornax.llm.bench.outcome import Outcome

__all__ = ["report_lines", "write_result"]

_TITLES = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
    "client_queue_time": ("queue time", "Wait at the Client"),
    "e2el_including_client_queue": ("E2EL incl. queue", "Latency with the Wait"),
}
_WIDTH = 52


def report_lines(config: BenchConfig, result: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines that say how the run went."""
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
    for name in config.metrics:
        if f"mean_{name}_ms" in result:
            yield from _metric(config, name, result)
    yield "=" * _WIDTH


def _metric(config: BenchConfig, name: str, result: Mapping[str, Any]) -> Iterator[str]:
    short, title = _TITLES[name]
    yield title.center(_WIDTH, "-")
    yield _line(f"Mean {short} (ms):", result[f"mean_{name}_ms"])
    yield _line(f"Median {short} (ms):", result[f"median_{name}_ms"])
    for percentile in config.percentiles:
        yield _line(f"P{percentile:g} {short} (ms):", result[f"p{percentile:g}_{name}_ms"])


def _line(label: str, value: float) -> str:
    return f"{label:<40} {value:<10.2f}" if isinstance(value, float) else f"{label:<40} {value:<10}"


def write_result(
    config: BenchConfig, model: str, result: Mapping[str, Any], outcomes: Sequence[Outcome]
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


def _details(outcomes: Sequence[Outcome]) -> dict[str, list[Any]]:
    """What happened to each request."""
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
