"""Options of the HTTP server; flags are those of `vllm serve` where it has them."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from fornax.config import ConfigError
from fornax.llm.server.limits import RequestLimits

__all__ = ["HttpConfig", "ServerConfig"]

_COUNTS = ("max_body_bytes", "max_header_bytes", "max_concurrent_requests", "max_connections")
_TIMES = ("header_timeout", "body_timeout", "send_timeout", "timeout_keep_alive")


@dataclass(frozen=True, kw_only=True)
class HttpConfig:
    """An HTTP server with OpenAI's interface: where it listens, whom it serves, what it allows."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for every interface."""
    port: int = 8000
    """Port to listen on; 0 lets the system choose one, which is printed."""
    served_model_name: tuple[str, ...] = ()
    """Names of the model in requests, the first in answers (default: the path it was given as)."""
    uds: str | None = None
    """Path of a Unix socket to listen on instead."""
    ssl_keyfile: str | None = None
    """File with the TLS key."""
    ssl_certfile: str | None = None
    """File with the TLS certificate."""
    root_path: str = ""
    """Path under which a proxy shows this server."""
    api_key: tuple[str, ...] = ()
    """Keys of which a client must present one; health, readiness and metrics stay open."""
    allowed_origins: tuple[str, ...] = ("*",)
    """Origins whose web pages may call the server; none switches CORS off."""
    allowed_methods: tuple[str, ...] = ("*",)
    """Methods that such pages may use."""
    allowed_headers: tuple[str, ...] = ("*",)
    """Headers that such pages may send."""
    allow_credentials: bool = False
    """Whether such pages may send credentials."""
    enable_request_id_headers: bool = True
    """Whether answers carry X-Request-Id."""
    disable_fastapi_docs: bool = False
    """Whether /docs and /openapi.json are left out."""
    disable_access_log: bool = False
    """Whether requests are not logged."""
    disable_access_log_for_endpoints: str = "/health,/ready,/metrics"
    """Paths whose requests are not logged, separated by commas."""
    run_dir: Path | None = None
    """Directory to write what the server does to, a line every two seconds, for fornax ui."""
    max_body_bytes: int = 4 * 1024 * 1024
    """Largest request body; a larger one gets 413."""
    max_header_bytes: int = 64 * 1024
    """Largest head of a request; a larger one gets 431."""
    header_timeout: float = 15.0
    """Seconds in which a request's head must arrive, else the connection is closed."""
    body_timeout: float = 60.0
    """Seconds in which a request's body must arrive, else 408."""
    send_timeout: float = 60.0
    """Seconds that a client may take no data that waits for it; then its connection is closed."""
    request_timeout: float = 0.0
    """Seconds a request may take, 504 after them; 0 for no limit."""
    max_concurrent_requests: int = 1024
    """Requests being answered at once; more get 429 with Retry-After."""
    max_connections: int = 4096
    """Connections open at once; more get 503."""
    timeout_keep_alive: float = 15.0
    """Seconds an idle connection is kept."""
    shutdown_timeout: float = 30.0
    """Seconds that running requests get to finish after SIGTERM."""

    def __post_init__(self) -> None:
        if bool(self.ssl_keyfile) != bool(self.ssl_certfile):
            raise ConfigError("ssl_keyfile and ssl_certfile are given together or not at all")
        for name in _COUNTS:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} is below 1; give at least 1")
        if not 0 <= self.port <= 65535:
            raise ConfigError(
                f"port={self.port} is not a port; use 1 to 65535, or 0 for a free one"
            )
        for name in ("request_timeout", "shutdown_timeout"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)} is negative; 0 is the least")
        for name in _TIMES:
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name}={getattr(self, name)} leaves no time; give seconds")


@dataclass(frozen=True, kw_only=True)
class ServerConfig(HttpConfig):
    """The server of a language model."""

    chat_template: str | None = None
    """File with a Jinja chat template, or the template itself (default: the model's own)."""
    generation_config: Literal["auto", "vllm"] = "auto"
    """Defaults of sampling: auto, those of the model's generation_config.json; vllm, none."""
    override_generation_config: dict[str, float | int] | None = None
    """Defaults of sampling that go before the model's, such as temperature."""
    trust_request_chat_template: bool = False
    """Whether a request may bring its own chat template."""
    default_chat_template_kwargs: dict[str, bool | int | float | str] | None = None
    """Variables given to the chat template unless a request says otherwise."""
    response_role: str = "assistant"
    """Role of the messages that the model writes."""
    enable_auto_tool_choice: bool = False
    """Whether the model may choose to call tools; needs tool_call_parser."""
    tool_call_parser: str | None = None
    """How the model writes tool calls: the name of a parser."""
    reasoning_parser: str | None = None
    """How the model marks its reasoning: the name of a parser."""
    exclude_tools_when_tool_choice_none: bool = False
    """Whether tools stay out of the prompt when tool_choice is none."""
    return_tokens_as_token_ids: bool = False
    """Whether logprobs name tokens as token_id:N, so that tokens that are not text stay apart."""
    enable_prompt_tokens_details: bool = False
    """Whether usage counts the prompt tokens found in the prefix cache."""
    enable_force_include_usage: bool = False
    """Whether every stream ends with its usage."""
    enable_dev_endpoints: bool = False
    """Whether /sleep, /wake_up, /is_sleeping and /reset_prefix_cache are there."""
    profile_dir: Path | None = None
    """Folder for profiles asked for by POST /start_profile (default: there is no such path)."""
    profile_max_seconds: float = 60.0
    """Longest time that a profile runs."""
    enable_adapter_endpoints: bool = False
    """Whether adapters may be loaded and unloaded while serving; it reads paths on this machine."""
    lora_modules: tuple[str, ...] = ()
    """Adapters to load at the start, each NAME=PATH; needs enable_lora."""
    max_queued_requests: int = 512
    """Completions waiting for a place in the batch; at more, requests get 429 with Retry-After."""
    otlp_traces_endpoint: str | None = None
    """Address of an OTLP collector over HTTP, such as http://127.0.0.1:4318/v1/traces, to send
    OpenTelemetry spans of requests to (extra otel)."""
    trace_sample_rate: float = 0.01
    """Share of requests to trace, among those whose caller did not decide; from 0 to 1."""
    request_limits: RequestLimits = field(default_factory=RequestLimits)
    """How much one request may ask for; more gets 400."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.enable_auto_tool_choice and not self.tool_call_parser:
            raise ConfigError(
                "enable_auto_tool_choice needs tool_call_parser; name the parser of the model"
            )
        if self.max_queued_requests < 0:
            raise ConfigError(
                f"max_queued_requests={self.max_queued_requests} is negative; 0 is the least"
            )
        if not 0 < self.profile_max_seconds <= 3600:
            raise ConfigError(
                f"profile_max_seconds={self.profile_max_seconds:g} must be above 0 and at most 3600"
            )
        if not 0 <= self.trace_sample_rate <= 1:
            raise ConfigError(f"trace_sample_rate={self.trace_sample_rate} is not between 0 and 1")
        for module in self.lora_modules:
            name, _, path = module.partition("=")
            if not name or not path:
                raise ConfigError(f"lora_modules: {module!r} is not NAME=PATH")
