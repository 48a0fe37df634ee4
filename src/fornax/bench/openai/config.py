"""Options of `fornax bench serve`: the flags of `vllm bench serve` that both have."""

import dataclasses
import math
from pathlib import Path
from typing import Literal

from fornax.config import ConfigError

__all__ = ["METRICS", "SLO_METRICS", "BenchConfig"]

METRICS = ("ttft", "tpot", "itl", "e2el", "client_queue_time", "e2el_including_client_queue")
SLO_METRICS = ("ttft", "tpot", "e2el")
_PATHS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """One run of load against a server: where it is, what to send, when, what to report."""

    host: str = "127.0.0.1"
    """The server's host."""
    port: int = 8000
    """The server's port."""
    base_url: str | None = None
    """The server's address, such as https://example.org/llm, instead of host and port."""
    backend: Literal["openai", "vllm", "openai-chat"] = "openai"
    """The interface to load: completions (openai or vllm), or chat completions (openai-chat)."""
    endpoint: str | None = None
    """Path of the interface (default: /v1/completions or /v1/chat/completions, by backend)."""
    header: tuple[str, ...] = ()
    """KEY=VALUE pairs sent with each request. OPENAI_API_KEY becomes a bearer token."""
    insecure: bool = False
    """Do not check the server's certificate."""
    model: str | None = None
    """The model's name (default: the first that the server lists)."""
    served_model_name: str | None = None
    """The name to send, where it differs from the model's."""
    tokenizer: Path | None = None
    """A tokenizer.json or its folder (default: the server's /tokenize and /detokenize)."""
    ready_check_timeout_sec: float = 0.0
    """Seconds to wait for the server to be ready; 0 does not wait."""

    dataset_name: Literal["random", "sharegpt", "custom", "timed_trace"] = "random"
    """Where prompts come from."""
    dataset_path: Path | None = None
    """The file of a dataset: ShareGPT's JSON, or lines of JSON (custom, timed_trace)."""
    num_prompts: int = 1000
    """Requests to send."""
    input_len: int | None = None
    """Tokens of a prompt; sets random-input-len."""
    output_len: int | None = None
    """Tokens to generate, for any dataset; for random it sets random-output-len."""
    random_input_len: int | None = None
    """random: tokens of a prompt, the shared prefix not counted (default: 1024, or what fits into
    the model's context)."""
    random_output_len: int | None = None
    """random: tokens to generate (default: 128, or a quarter of a context that is too short)."""
    random_range_ratio: float = 0.0
    """random: lengths are drawn from length x (1 - r) to length x (1 + r)."""
    random_prefix_len: int = 0
    """random: tokens that all prompts begin with, before their own."""
    timed_trace_chunk_hash_size: int = 16
    """timed_trace: tokens that one of a request's hash_ids stands for."""
    timed_trace_sec_multiplier: float = 1.0
    """timed_trace: seconds in a unit of its timestamps (0.001 for milliseconds)."""
    no_oversample: bool = False
    """Send fewer requests when the dataset has fewer, instead of repeating it."""
    disable_shuffle: bool = False
    """sharegpt and custom: keep the order of the file."""
    seed: int = 0
    """Of prompts, arrivals and choices."""

    request_rate: float = math.inf
    """Requests per second; inf sends all at once."""
    burstiness: float = 1.0
    """Shape of the gamma distribution of intervals: 1 is Poisson, less is burstier."""
    max_concurrency: int | None = None
    """Requests in flight at most."""
    ramp_up_strategy: Literal["linear", "exponential"] | None = None
    """Let the rate grow from ramp-up-start-rps to ramp-up-end-rps over the run."""
    ramp_up_start_rps: float | None = None
    """Requests per second at the start of the ramp."""
    ramp_up_end_rps: float | None = None
    """Requests per second at its end."""
    self_timed: bool | None = None
    """Send at the dataset's timestamps (default: for timed_trace only)."""
    num_warmups: int = 0
    """Requests sent before, and not counted."""

    ignore_eos: bool = False
    """Generate on after the end-of-text token."""
    logprobs: int | None = None
    """Log probabilities to ask for, a token."""
    temperature: float | None = None
    """Sampling temperature (default: the server's)."""
    top_p: float | None = None
    """Nucleus sampling (default: the server's)."""
    top_k: int | None = None
    """Sample from the k likeliest tokens (default: the server's)."""
    min_p: float | None = None
    """Least probability, relative to the likeliest token's (default: the server's)."""
    frequency_penalty: float | None = None
    """Frequency penalty (default: the server's)."""
    presence_penalty: float | None = None
    """Presence penalty (default: the server's)."""
    repetition_penalty: float | None = None
    """Repetition penalty (default: the server's)."""
    extra_body: str | None = None
    """A JSON object whose fields are added to each request's body."""
    lora_modules: tuple[str, ...] = ()
    """Adapters' names; each request names one of them as its model."""
    lora_assignment: Literal["random", "round-robin"] = "random"
    """How adapters are given to requests."""
    request_id_prefix: str | None = None
    """Requests' x-request-id is this and their number (default: bench-, random digits, -)."""

    percentile_metrics: str = "ttft,tpot,itl"
    """Metrics to report, with commas: ttft, tpot, itl, e2el, client_queue_time, …"""
    metric_percentiles: str = "99"
    """Percentiles to report, with commas."""
    goodput: tuple[str, ...] = ()
    """Service level objectives as METRIC:MILLISECONDS of ttft, tpot, e2el; counts requests within
    all of them."""
    price: float | None = None
    """US$ of one of the server's chips for an hour; adds what a million tokens cost."""
    chips: int = 1
    """Chips that the server runs on, for price."""
    disable_tqdm: bool = False
    """Show no progress."""
    save_result: bool = False
    """Write the result as JSON."""
    save_detailed: bool = False
    """Write times, texts and errors of each request too."""
    label: str | None = None
    """Begins the result's file name (default: the backend)."""
    metadata: tuple[str, ...] = ()
    """KEY=VALUE pairs to keep in the result."""
    result_dir: Path = Path()
    """Folder of the result (default: the current one)."""
    result_filename: str | None = None
    """The result's file name (default: label, rate, model and time)."""

    def __post_init__(self) -> None:
        self._check_sizes()
        self._check_arrivals()
        _numbers("metric_percentiles", self.metric_percentiles, 100)
        for name in self.metrics:
            if name not in METRICS:
                raise ConfigError(
                    f"percentile_metrics: {name!r} is not a metric; use {', '.join(METRICS)}"
                )
        self.objectives()
        _pairs("header", self.header)
        _pairs("metadata", self.metadata)
        if self.dataset_name != "random" and self.dataset_path is None:
            raise ConfigError(f"dataset_name={self.dataset_name} needs a dataset_path")

    def _check_sizes(self) -> None:
        for name in ("num_prompts", "timed_trace_chunk_hash_size"):
            _at_least(name, getattr(self, name), 1)
        for name in ("input_len", "output_len", "random_output_len", "max_concurrency"):
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), 1)
        for name in ("random_prefix_len", "num_warmups", "ready_check_timeout_sec"):
            _at_least(name, getattr(self, name), 0)
        if self.random_input_len is not None:
            _at_least("random_input_len", self.random_input_len, 0 if self.random_prefix_len else 1)
        _at_least("chips", self.chips, 1)
        if self.price is not None and not 0 <= self.price < math.inf:
            raise ConfigError(
                f"price={self.price} is not a price; give US dollars per chip and hour, 0 or more"
            )
        if self.price is None and self.chips != 1:
            raise ConfigError(
                f"chips={self.chips} is for price, which is not given; add --price, the US dollars "
                "that one chip costs an hour, or leave chips out"
            )
        if not 0 <= self.random_range_ratio < 1:
            raise ConfigError(
                f"random_range_ratio={self.random_range_ratio} must be at least 0 and below 1"
            )

    def _check_arrivals(self) -> None:
        for name in ("request_rate", "burstiness", "timed_trace_sec_multiplier"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)} must be above 0")
        ramp = (self.ramp_up_start_rps, self.ramp_up_end_rps)
        if self.ramp_up_strategy is None:
            if ramp != (None, None):
                raise ConfigError(
                    "ramp_up_start_rps and ramp_up_end_rps need ramp_up_strategy=linear or "
                    "exponential"
                )
            return
        if any(rate is None or rate <= 0 or math.isinf(rate) for rate in ramp):
            raise ConfigError(
                f"ramp_up_strategy={self.ramp_up_strategy} needs ramp_up_start_rps and "
                "ramp_up_end_rps above 0"
            )
        if not math.isinf(self.request_rate) or self.follows_timestamps:
            raise ConfigError(
                "ramp_up_strategy sets the rate of requests; leave request_rate and self_timed out"
            )

    @property
    def follows_timestamps(self) -> bool:
        """Whether requests are sent at the times that the dataset gives."""
        if self.self_timed is None:
            return self.dataset_name == "timed_trace"
        return self.self_timed

    @property
    def ramp(self) -> tuple[str, float, float] | None:
        """How the rate grows, and from where to where; None where it is constant."""
        start, end = self.ramp_up_start_rps, self.ramp_up_end_rps
        if self.ramp_up_strategy is None or start is None or end is None:
            return None
        return self.ramp_up_strategy, start, end

    @property
    def url(self) -> str:
        """Address of the server, without a path of the interface."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return (self.base_url or f"http://{host}:{self.port}").rstrip("/")

    @property
    def path(self) -> str:
        """Path of the interface."""
        return self.endpoint or _PATHS.get(self.backend, _PATHS["openai"])

    @property
    def chat(self) -> bool:
        """Whether the interface takes messages."""
        return self.backend == "openai-chat"

    @property
    def metrics(self) -> tuple[str, ...]:
        """Metrics to report."""
        return tuple(name.strip() for name in self.percentile_metrics.split(",") if name.strip())

    @property
    def percentiles(self) -> tuple[float, ...]:
        """Percentiles to report."""
        return _numbers("metric_percentiles", self.metric_percentiles, 100)

    def objectives(self) -> dict[str, float]:
        """Seconds that each metric of the service level objective may take."""
        found = {}
        for pair in self.goodput:
            name, colon, value = pair.partition(":")
            if name not in SLO_METRICS or not colon:
                raise ConfigError(
                    f"goodput: {pair!r} is not an objective; write METRIC:MILLISECONDS, the metric "
                    f"one of {', '.join(SLO_METRICS)}"
                )
            (found[name],) = _numbers("goodput", value, math.inf)
        return {name: milliseconds / 1e3 for name, milliseconds in found.items()}

    def headers(self) -> dict[str, str]:
        """Headers to send with each request."""
        return _pairs("header", self.header)

    def notes(self) -> dict[str, str]:
        """Metadata to keep in the result."""
        return _pairs("metadata", self.metadata)


def _at_least(name: str, value: float, least: float) -> None:
    if not value >= least:
        raise ConfigError(f"{name}={value} must be at least {least}")


def _pairs(name: str, pairs: tuple[str, ...]) -> dict[str, str]:
    for pair in pairs:
        if "=" not in pair:
            raise ConfigError(f"{name}: {pair!r} is not a pair; write KEY=VALUE")
    return {key: value for key, _, value in (pair.partition("=") for pair in pairs)}


def _numbers(name: str, text: str, most: float) -> tuple[float, ...]:
    try:
        numbers = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"{name}: {text!r} is not numbers with commas between") from None
    if not all(0 <= number <= most for number in numbers):
        raise ConfigError(f"{name}: numbers of {text!r} must be at least 0 and at most {most}")
    return numbers
