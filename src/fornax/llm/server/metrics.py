"""What `/metrics` shows: vLLM's names, so that its dashboards work, and Fornax's own.

`Metrics` is the engine's observer. Each field of the tables below is written by one thread only:
the engine's, or, for HTTP, the server's.
"""

import time
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder

from fornax.llm.server.histogram import Counter, Gauge, Histogram, powers
from fornax.llm.server.record import Record
from fornax.llm.stats import RequestStats, StepStats

__all__ = ["Metrics"]

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


class Metrics:
    """Everything measured, as a Prometheus collector."""

    def __init__(self, model: str, *, max_model_len: int, max_loras: int = 0):
        """`model` is the label `model_name`."""
        self._max_loras = str(max_loras)
        lengths = powers(max_model_len)
        self._labels = {"model_name": model, "engine": "0"}
        self._http = _Http()

        self.running = Gauge("vllm:num_requests_running", "Sequences that run.")
        self.waiting = Gauge("vllm:num_requests_waiting", "Sequences that wait.")
        self.sleep_state = Gauge(
            "vllm:engine_sleep_state", "1 for the state the engine is in.", ["sleep_state"]
        )
        self.usage = Gauge("vllm:kv_cache_usage_perc", "Share of the cache in use, 0 to 1.")
        self.lora = Gauge(
            "vllm:lora_requests_info",
            "Time of the last change of the adapters in use.",
            ["max_lora", "waiting_lora_adapters", "running_lora_adapters"],
        )
        self.cache_config = Gauge("vllm:cache_config_info", "The cache.", [])
        self.queries = Counter("vllm:prefix_cache_queries", "Prompt tokens looked up.")
        self.hits = Counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self.preemptions = Counter("vllm:num_preemptions", "Sequences pushed out of the cache.")
        self.prompt_tokens = Counter("vllm:prompt_tokens", "Prompt tokens, cached ones included.")
        self.by_source = Counter(
            "vllm:prompt_tokens_by_source", "Prompt tokens by where they came from.", ["source"]
        )
        self.cached = Counter("vllm:prompt_tokens_cached", "Prompt tokens from the prefix cache.")
        self.generation_tokens = Counter("vllm:generation_tokens", "Tokens made.")
        self.success = Counter(
            "vllm:request_success", "Completions by how they ended.", ["finished_reason"]
        )
        self.drafts = Counter("vllm:spec_decode_num_drafts", "Times that tokens were proposed.")
        self.draft_tokens = Counter("vllm:spec_decode_num_draft_tokens", "Tokens proposed.")
        self.accepted = Counter("vllm:spec_decode_num_accepted_tokens", "Proposed tokens accepted.")
        self.accepted_at = Counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Proposed tokens accepted, by place in the proposal.",
            ["position"],
        )
        self.prompt_length = Histogram(
            "vllm:request_prompt_tokens", "Prompt tokens of a request.", lengths
        )
        self.made = Histogram("vllm:request_generation_tokens", "Tokens made.", lengths)
        self.step_tokens = Histogram("vllm:iteration_tokens_total", "Tokens of a step.", _STEP)
        self.longest = Histogram(
            "vllm:request_max_num_generation_tokens", "Tokens of the longest completion.", lengths
        )
        self.params_n = Histogram("vllm:request_params_n", "Field n.", [1.0, 2.0, 5.0, 10.0, 20.0])
        self.params_max = Histogram("vllm:request_params_max_tokens", "Field max_tokens.", lengths)
        self.computed = Histogram(
            "vllm:request_prefill_kv_computed_tokens", "Prompt tokens computed.", lengths
        )
        self.first = Histogram(
            "vllm:time_to_first_token_seconds", "Arrival to first token.", _FIRST_TOKEN
        )
        self.inter = Histogram("vllm:inter_token_latency_seconds", "Token to token.", _INTER_TOKEN)
        self.per_token = Histogram(
            "vllm:request_time_per_output_token_seconds", "Mean of a request.", _INTER_TOKEN
        )
        self.whole = Histogram("vllm:e2e_request_latency_seconds", "Arrival to end.", _REQUEST)
        self.queue = Histogram("vllm:request_queue_time_seconds", "Time waiting.", _REQUEST)
        self.inference = Histogram("vllm:request_inference_time_seconds", "Running.", _REQUEST)
        self.prefill = Histogram("vllm:request_prefill_time_seconds", "Prefill.", _REQUEST)
        self.decode = Histogram("vllm:request_decode_time_seconds", "Decode.", _REQUEST)

        self.compilations = Counter(
            "fornax:compilations_after_ready", "Steps compiled while serving: a fault.", ["program"]
        )
        self.bucket_tokens = Counter("fornax:bucket_tokens", "Tokens by bucket.", ["bucket"])
        self.padding = Counter("fornax:bucket_padding_tokens", "Padding by bucket.", ["bucket"])
        self.steps = Counter("fornax:steps", "Steps by bucket.", ["bucket"])
        self.step_seconds = Counter("fornax:step_seconds", "Time in steps by bucket.", ["bucket"])
        self.compilations.add(0, "")
        for reason in ("stop", "length", "abort", "error", "repetition"):
            self.success.add(0, reason)
        for source in ("local_compute", "local_cache_hit", "external_kv_transfer"):
            self.by_source.add(0, source)
        self.set_sleep(0)

        self._families = [
            value for value in vars(self).values() if isinstance(value, Gauge | Counter | Histogram)
        ]
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._registry.register(self)
        self._registry.register(self._http)

    def describe_cache(self, values: Mapping[str, object]) -> None:
        """Set the labels of `vllm:cache_config_info`."""
        self.cache_config.labels = tuple(values)
        self.cache_config.values = {tuple(map(str, values.values())): 1.0}

    def set_sleep(self, level: int) -> None:
        """Say whether the engine sleeps: 0 awake, else the level."""
        for number, state in enumerate(_SLEEP_STATES):
            self.sleep_state.set(float(number == level), state)

    def step(self, stats: StepStats) -> None:
        """A step was processed."""
        self.running.set(stats.running)
        self.waiting.set(stats.waiting)
        self.usage.set(stats.cache_usage)
        self.queries.add(stats.prefix_queries)
        self.hits.add(stats.prefix_hits)
        self.preemptions.add(stats.preemptions)
        self.by_source.add(stats.prompt_tokens, "local_compute")
        self.generation_tokens.add(stats.generation_tokens)
        self.step_tokens.observe(stats.tokens)
        bucket = str(stats.bucket)
        self.bucket_tokens.add(stats.tokens, bucket)
        self.padding.add(stats.bucket - stats.tokens, bucket)
        self.steps.add(1, bucket)
        self.step_seconds.add(stats.seconds, bucket)
        if stats.drafts:
            self.drafts.add(stats.drafts)
            self.draft_tokens.add(stats.draft_tokens)
            self.accepted.add(stats.accepted_tokens)
            for position, count in enumerate(stats.accepted_per_position):
                self.accepted_at.add(count, str(position))
        if stats.running_loras or stats.waiting_loras:
            self._set_loras(stats)
        for program in stats.compiled:
            self.compilations.add(1, program)

    def _set_loras(self, stats: StepStats) -> None:
        labels = (
            self._max_loras,
            ",".join(stats.waiting_loras),
            ",".join(stats.running_loras),
        )
        self.lora.values = {labels: time.time()}

    def first_token(self, seconds: float) -> None:
        """A request's first token."""
        self.first.observe(seconds)

    def inter_token(self, seconds: float) -> None:
        """A later token."""
        self.inter.observe(seconds)

    def finished(self, stats: RequestStats) -> None:
        """A request ended."""
        for reason in stats.finish_reasons:
            self.success.add(1, reason)
        self.prompt_tokens.add(stats.prompt_tokens)
        self.cached.add(stats.cached_tokens)
        self.by_source.add(stats.cached_tokens, "local_cache_hit")
        self.prompt_length.observe(stats.prompt_tokens)
        self.made.observe(stats.generation_tokens)
        self.longest.observe(stats.generation_tokens / max(1, stats.n))
        self.params_n.observe(stats.n)
        if stats.max_tokens is not None:
            self.params_max.observe(stats.max_tokens)
        self.computed.observe(stats.prompt_tokens - stats.cached_tokens)
        self.whole.observe(stats.finished - stats.arrival)
        if not stats.scheduled:  # it never ran
            self.queue.observe(stats.finished - stats.arrival)
            return
        self.queue.observe(stats.scheduled - stats.arrival)
        self.inference.observe(stats.finished - stats.scheduled)
        if stats.first_token:
            self.prefill.observe(stats.first_token - stats.scheduled)
            self.decode.observe(stats.finished - stats.first_token)
            later = stats.generation_tokens - stats.n
            if later > 0:
                self.per_token.observe((stats.finished - stats.first_token) * stats.n / later)

    def idle(self) -> None:
        """Nothing runs or waits: no step comes to say so."""
        for gauge in (self.running, self.waiting, self.usage):
            gauge.set(0.0)

    def request(self, record: Record) -> None:
        """An HTTP request ended."""
        self._http.observe(record)

    def collect(self) -> Iterator[Metric]:
        """All of it, for Prometheus."""
        names, labels = tuple(self._labels), tuple(self._labels.values())
        for family in self._families:
            yield family.family(names, labels)

    def exposition(self) -> tuple[bytes, str]:
        """The text and its content type."""
        encode, kind = choose_encoder("")
        return encode(self._registry), kind


class _Http:
    """Requests and their time, by route."""

    def __init__(self) -> None:
        self._requests = Counter("http_requests", "HTTP requests.", ["handler", "method", "status"])
        self._seconds: dict[tuple[str, str], Histogram] = {}

    def observe(self, record: Record) -> None:
        """Count a request."""
        method = record.method if record.method in _METHODS else "other"
        self._requests.add(1, record.handler, method, f"{record.status // 100}xx")
        key = (record.handler, method)
        if key not in self._seconds:
            self._seconds[key] = Histogram(
                "http_request_duration_seconds", "From first byte to last.", _REQUEST
            )
        self._seconds[key].observe(time.monotonic() - record.started)

    def collect(self) -> Iterator[Metric]:
        """All of it, for Prometheus."""
        yield self._requests.family((), ())
        merged: Metric | None = None
        for (handler, method), histogram in list(self._seconds.items()):
            family = histogram.family(("handler", "method"), (handler, method))
            if merged is None:
                merged = family
            else:
                merged.samples += family.samples
        if merged is not None:
            yield merged
