"""What `/metrics` shows: vLLM's names, so that its dashboards work, and Fornax's own.

`Metrics` is the engine's observer.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from functools import cache

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder

from fornax.llm.server.middleware import RequestContext
from fornax.llm.server.tracing import RequestTracer
from fornax.llm.stats import RequestStats, StepStats

__all__ = ["Metrics"]

disable_created_metrics()  # they would double the lines of every scrape

_FIRST_TOKEN = [
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
]  # fmt: skip
_INTER_TOKEN = [
    0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5,
    5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
]  # fmt: skip
_REQUEST = [
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
]  # fmt: skip
_STEP = [float(2**power) for power in range(15)]
_METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"})
_SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")
_LABELS = ("model_name", "engine")
_LORA_LABELS = ("max_lora", "waiting_lora_adapters", "running_lora_adapters")

_GAUGES = {
    "vllm:num_requests_running": "Sequences that run.",
    "vllm:num_requests_waiting": "Sequences that wait.",
    "vllm:kv_cache_usage_perc": "Share of the cache in use, 0 to 1.",
}
_COUNTERS = {
    "vllm:prefix_cache_queries": "Prompt tokens looked up.",
    "vllm:prefix_cache_hits": "Prompt tokens found in the prefix cache.",
    "vllm:num_preemptions": "Sequences pushed out of the cache.",
    "vllm:prompt_tokens": "Prompt tokens, cached ones included.",
    "vllm:prompt_tokens_cached": "Prompt tokens from the prefix cache.",
    "vllm:generation_tokens": "Tokens made.",
    "vllm:spec_decode_num_drafts": "Times that tokens were proposed.",
    "vllm:spec_decode_num_draft_tokens": "Tokens proposed.",
    "vllm:spec_decode_num_accepted_tokens": "Proposed tokens accepted.",
}
_LABELLED = {
    "vllm:prompt_tokens_by_source": ("source", "Prompt tokens by where they came from."),
    "vllm:request_success": ("finished_reason", "Completions by how they ended."),
    "vllm:spec_decode_num_accepted_tokens_per_pos": (
        "position",
        "Proposed tokens accepted, by place in the proposal.",
    ),
    "fornax:compilations_after_ready": ("program", "Steps compiled while serving: a fault."),
    "fornax:bucket_tokens": ("bucket", "Tokens by bucket."),
    "fornax:bucket_padding_tokens": ("bucket", "Padding by bucket."),
    "fornax:steps": ("bucket", "Steps by bucket."),
    "fornax:step_seconds": ("bucket", "Time in steps by bucket."),
}
"""Counters with a label of their own, and which."""
_LENGTHS = None
"""Bounds up to the longest sequence."""
_HISTOGRAMS: dict[str, tuple[list[float] | None, str]] = {
    "vllm:request_prompt_tokens": (_LENGTHS, "Prompt tokens of a request."),
    "vllm:request_generation_tokens": (_LENGTHS, "Tokens made."),
    "vllm:iteration_tokens_total": (_STEP, "Tokens of a step."),
    "vllm:request_max_num_generation_tokens": (_LENGTHS, "Tokens of the longest completion."),
    "vllm:request_params_n": ([1.0, 2.0, 5.0, 10.0, 20.0], "Field n."),
    "vllm:request_params_max_tokens": (_LENGTHS, "Field max_tokens."),
    "vllm:request_prefill_kv_computed_tokens": (_LENGTHS, "Prompt tokens computed."),
    "vllm:time_to_first_token_seconds": (_FIRST_TOKEN, "Arrival to first token."),
    "vllm:inter_token_latency_seconds": (_INTER_TOKEN, "Token to token."),
    "vllm:request_time_per_output_token_seconds": (_INTER_TOKEN, "Mean of a request."),
    "vllm:e2e_request_latency_seconds": (_REQUEST, "Arrival to end."),
    "vllm:request_queue_time_seconds": (_REQUEST, "Time waiting."),
    "vllm:request_inference_time_seconds": (_REQUEST, "Running."),
    "vllm:request_prefill_time_seconds": (_REQUEST, "Prefill."),
    "vllm:request_decode_time_seconds": (_REQUEST, "Decode."),
}

_MEANS = {
    "first_token_seconds": "vllm:time_to_first_token_seconds",
    "inter_token_seconds": "vllm:inter_token_latency_seconds",
    "request_seconds": "vllm:e2e_request_latency_seconds",
    "queue_seconds": "vllm:request_queue_time_seconds",
}
"""Columns of `server.jsonl` that are means of a histogram."""


class Metrics:
    """The engine's metrics and those of HTTP, in registries of their own."""

    def __init__(
        self,
        model: str,
        *,
        max_model_len: int,
        max_loras: int = 0,
        cache_config: Mapping[str, object] | None = None,
    ):
        """`model` is the label `model_name`; `cache_config` labels `vllm:cache_config_info`."""
        self._of_model = (model, "0")
        self._max_loras = str(max_loras)
        self._engine = CollectorRegistry()
        self._gauges = {name: self._gauge(name, text)() for name, text in _GAUGES.items()}
        self._counters = {name: self._counter(name, text)() for name, text in _COUNTERS.items()}
        self._labelled = {
            name: self._counter(name, text, label) for name, (label, text) in _LABELLED.items()
        }
        lengths = _lengths(max_model_len)
        self._histograms = {
            name: Histogram(
                name, text, _LABELS, buckets=bounds or lengths, registry=self._engine
            ).labels(*self._of_model)
            for name, (bounds, text) in _HISTOGRAMS.items()
        }
        self._sleep_state = self._gauge(
            "vllm:engine_sleep_state", "1 for the state the engine is in.", "sleep_state"
        )
        self._loras = Gauge(
            "vllm:lora_requests_info",
            "Time of the last change of the adapters in use.",
            [*_LABELS, *_LORA_LABELS],
            registry=self._engine,
        )
        cache_labels = {name: str(value) for name, value in (cache_config or {}).items()}
        cache_info = self._gauge("vllm:cache_config_info", "The cache.", *cache_labels)
        cache_info(*cache_labels.values()).set(1)
        self._http_requests = Counter(
            "http_requests", "HTTP requests.", ["handler", "method", "status"], registry=None
        )
        self._http_seconds = Histogram(
            "http_request_duration_seconds",
            "From first byte to last.",
            ["handler", "method"],
            buckets=_REQUEST,
            registry=None,
        )
        self._all = CollectorRegistry()
        ProcessCollector(registry=self._all)
        for each in (self._engine, self._http_requests, self._http_seconds):
            self._all.register(each)
        self.tracer: RequestTracer | None = None
        """Told of what ends, too."""
        self._before: dict[str, float] = {}
        """What `row` counted from when it was last called."""
        self._show_zeros()

    def _show_zeros(self) -> None:
        """Children that are there before they count, so that rates begin at zero."""
        self.set_sleep(0)
        self._labelled["fornax:compilations_after_ready"]("")
        for reason in ("stop", "length", "abort", "error", "repetition"):
            self._labelled["vllm:request_success"](reason)
        for source in ("local_compute", "local_cache_hit", "external_kv_transfer"):
            self._labelled["vllm:prompt_tokens_by_source"](source)

    def _gauge(self, name: str, text: str, *labels: str) -> Callable[..., Gauge]:
        """A gauge's child by the values of its own labels."""
        gauge = Gauge(name, text, [*_LABELS, *labels], registry=self._engine)
        return cache(lambda *values: gauge.labels(*self._of_model, *values))

    def _counter(self, name: str, text: str, *labels: str) -> Callable[..., Counter]:
        """A counter's child by the values of its own labels."""
        counter = Counter(name, text, [*_LABELS, *labels], registry=self._engine)
        return cache(lambda *values: counter.labels(*self._of_model, *values))

    def set_sleep(self, level: int) -> None:
        """Say whether the engine sleeps: 0 awake, else the level."""
        for number, state in enumerate(_SLEEP_STATES):
            self._sleep_state(state).set(number == level)

    def step(self, stats: StepStats) -> None:
        """A step was processed."""
        gauges, counters, labelled = self._gauges, self._counters, self._labelled
        gauges["vllm:num_requests_running"].set(stats.running)
        gauges["vllm:num_requests_waiting"].set(stats.waiting)
        gauges["vllm:kv_cache_usage_perc"].set(stats.cache_usage)
        counters["vllm:prefix_cache_queries"].inc(stats.prefix_queries)
        counters["vllm:prefix_cache_hits"].inc(stats.prefix_hits)
        counters["vllm:num_preemptions"].inc(stats.preemptions)
        counters["vllm:generation_tokens"].inc(stats.generation_tokens)
        labelled["vllm:prompt_tokens_by_source"]("local_compute").inc(stats.prompt_tokens)
        for _ in range(stats.steps):
            self._histograms["vllm:iteration_tokens_total"].observe(stats.tokens)
        bucket = str(stats.bucket)
        padding = stats.bucket - stats.tokens
        labelled["fornax:bucket_tokens"](bucket).inc(stats.tokens * stats.steps)
        labelled["fornax:bucket_padding_tokens"](bucket).inc(padding * stats.steps)
        labelled["fornax:steps"](bucket).inc(stats.steps)
        labelled["fornax:step_seconds"](bucket).inc(stats.seconds)
        if stats.drafts:
            counters["vllm:spec_decode_num_drafts"].inc(stats.drafts)
            counters["vllm:spec_decode_num_draft_tokens"].inc(stats.draft_tokens)
            counters["vllm:spec_decode_num_accepted_tokens"].inc(stats.accepted_tokens)
            accepted_at = labelled["vllm:spec_decode_num_accepted_tokens_per_pos"]
            for position, count in enumerate(stats.accepted_per_position):
                accepted_at(str(position)).inc(count)
        if stats.running_loras or stats.waiting_loras:
            waiting, running = ",".join(stats.waiting_loras), ",".join(stats.running_loras)
            self._loras.clear()
            labels = (*self._of_model, self._max_loras, waiting, running)
            self._loras.labels(*labels).set_to_current_time()
        for program in stats.compiled:
            labelled["fornax:compilations_after_ready"](program).inc()

    def first_token(self, seconds: float) -> None:
        """A request's first token."""
        self._histograms["vllm:time_to_first_token_seconds"].observe(seconds)

    def inter_token(self, seconds: float) -> None:
        """A later token."""
        self._histograms["vllm:inter_token_latency_seconds"].observe(seconds)

    def finished(self, stats: RequestStats) -> None:
        """A request ended."""
        if self.tracer is not None:
            self.tracer.ended(stats)
        counters, labelled = self._counters, self._labelled
        for reason in stats.finish_reasons:
            labelled["vllm:request_success"](reason).inc()
        counters["vllm:prompt_tokens"].inc(stats.prompt_tokens)
        counters["vllm:prompt_tokens_cached"].inc(stats.cached_tokens)
        labelled["vllm:prompt_tokens_by_source"]("local_cache_hit").inc(stats.cached_tokens)
        values: dict[str, float] = {
            "vllm:request_prompt_tokens": stats.prompt_tokens,
            "vllm:request_generation_tokens": stats.generation_tokens,
            "vllm:request_max_num_generation_tokens": stats.generation_tokens / max(1, stats.n),
            "vllm:request_params_n": stats.n,
            "vllm:request_prefill_kv_computed_tokens": stats.prompt_tokens - stats.cached_tokens,
            "vllm:e2e_request_latency_seconds": stats.finished - stats.arrival,
        }
        if stats.max_tokens is not None:
            values["vllm:request_params_max_tokens"] = stats.max_tokens
        # Without a time of its scheduling it never ran.
        began = stats.scheduled or stats.finished
        values["vllm:request_queue_time_seconds"] = began - stats.arrival
        if stats.scheduled:
            values["vllm:request_inference_time_seconds"] = stats.finished - began
        if stats.scheduled and stats.first_token:
            decode, later = stats.finished - stats.first_token, stats.generation_tokens - stats.n
            values["vllm:request_prefill_time_seconds"] = stats.first_token - began
            values["vllm:request_decode_time_seconds"] = decode
            if later > 0:
                values["vllm:request_time_per_output_token_seconds"] = decode * stats.n / later
        for name, value in values.items():
            self._histograms[name].observe(value)

    def idle(self) -> None:
        """Nothing runs or waits: no step comes to say so."""
        for gauge in self._gauges.values():
            gauge.set(0)

    def request(self, context: RequestContext) -> None:
        """An HTTP request ended."""
        if self.tracer is not None:
            self.tracer.request(context)
        method = context.method if context.method in _METHODS else "other"
        status = f"{context.status // 100}xx"
        self._http_requests.labels(context.handler, method, status).inc()
        seconds = time.monotonic() - context.started
        self._http_seconds.labels(context.handler, method).observe(seconds)

    def close(self) -> None:
        """Send the spans that wait."""
        if self.tracer is not None:
            self.tracer.close()

    def collect(self) -> Iterable[Metric]:
        """The engine's metrics, without those of HTTP and of the process."""
        return self._engine.collect()

    def row(self, seconds: float) -> dict[str, object]:
        """What `server.jsonl` has of the `seconds` since the last call: sequences and the cache
        now, rates, and means of what ended meanwhile (None where nothing did)."""
        now: dict[str, float] = {}
        for family in self.collect():
            for sample in family.samples:
                if "le" not in sample.labels:
                    now[sample.name] = now.get(sample.name, 0.0) + sample.value
        before, self._before = self._before, now
        spent = {name: value - before.get(name, 0.0) for name, value in now.items()}

        def rate(name: str) -> float:
            return round(spent.get(name, 0.0) / max(seconds, 1e-3), 3)

        def mean(total: str, count: str) -> float | None:
            number = spent.get(count, 0.0)
            return round(spent.get(total, 0.0) / number, 6) if number else None

        tokens = spent.get("fornax:bucket_tokens_total", 0.0)
        padding = spent.get("fornax:bucket_padding_tokens_total", 0.0)
        queries = spent.get("vllm:prefix_cache_queries_total", 0.0)
        hits = spent.get("vllm:prefix_cache_hits_total", 0.0)
        return {
            "running": now.get("vllm:num_requests_running", 0.0),
            "waiting": now.get("vllm:num_requests_waiting", 0.0),
            "cache_usage": now.get("vllm:kv_cache_usage_perc", 0.0),
            "requests": now.get("vllm:e2e_request_latency_seconds_count", 0.0),
            "requests_per_second": rate("vllm:e2e_request_latency_seconds_count"),
            "prompt_tokens_per_second": rate("vllm:prompt_tokens_total"),
            "generation_tokens_per_second": rate("vllm:generation_tokens_total"),
            "steps_per_second": rate("fornax:steps_total"),
            "batch_tokens": mean("fornax:bucket_tokens_total", "fornax:steps_total"),
            "batch_fill": round(tokens / (tokens + padding), 4) if tokens + padding else None,
            "prefix_hit_rate": round(hits / queries, 4) if queries else None,
            "preemptions": now.get("vllm:num_preemptions_total", 0.0),
            **{name: mean(f"{metric}_sum", f"{metric}_count") for name, metric in _MEANS.items()},
        }

    def exposition(self) -> tuple[bytes, str]:
        """The text and its content type."""
        encode, kind = choose_encoder("")
        return encode(self._all), kind


def _lengths(highest: int) -> list[float]:
    """Bounds 1, 2, 5, 10, 20, 50, ... up to `highest`."""
    bounds: list[float] = []
    scale = 1
    while scale <= highest:
        bounds += [float(scale * step) for step in (1, 2, 5) if scale * step <= highest]
        scale *= 10
    return bounds
