"""Options of `fornax bench host`: which server, which model, how much load."""

import dataclasses
import re
import ssl
from pathlib import Path
from typing import Literal

from fornax.config import ConfigError
from fornax.serving.client import parse_server, tls_context

__all__ = ["HostBenchConfig"]

_SHAPE = re.compile(r"([^:]+):(\d+(?:,\d+)*)")
_DEFAULT_URLS = {"http": "127.0.0.1:8080", "grpc": "127.0.0.1:8081"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostBenchConfig:
    """One measurement: concurrent clients that each send a request when the last is answered."""

    model: str = ""
    """The model's name; NAME:FUNCTION for another function than its first."""
    version: str = ""
    """Its version or a label (default: the server's choice)."""
    protocol: Literal["http", "grpc"] = "http"
    """http: V2 with binary tensors; grpc: V2 with raw contents."""
    url: str = ""
    """The server: host:port, or http(s)://host:port (default: 127.0.0.1, port 8080 or 8081)."""
    insecure: bool = False
    """Do not check the server's certificate (HTTP)."""
    ca: Path | None = None
    """File with the authority of the server's certificate."""
    cert: Path | None = None
    """File with a certificate to present."""
    key: Path | None = None
    """File with its key (default: the certificate's file)."""
    tls: bool = False
    """Speak TLS; https:// says so too."""

    concurrency: tuple[int, ...] = (32,)
    """Requests in flight; several numbers are measured one after another."""
    seconds: float = 5.0
    """How long to measure at each concurrency."""
    warmup_seconds: float = 0.5
    """How long to send before that, uncounted."""
    timeout: float = 30.0
    """Seconds after which a request that has no answer counts as failed."""
    processes: int = 0
    """Processes that send (default: as many as leave half of the cores to the server)."""

    rows: int = 1
    """Rows of each generated request, where the model has a batch."""
    shape: tuple[str, ...] = ()
    """Shapes of generated inputs with sizes that vary: NAME:8,128 (default: the rows, and 16)."""
    input: Path | None = None
    """File of inputs to send instead: .npz or .safetensors of arrays by the inputs' names, or .json
    with the body of one V2 request or a list of them."""
    distinct: int = 16
    """Different requests to generate; they are sent in turn."""
    seed: int = 0
    """Of the generated values."""
    parameters: dict[str, bool | int | float | str] = dataclasses.field(default_factory=dict)
    """Parameters of each request, such as priority or max_tokens."""

    json: Path | None = None
    """Write every figure."""

    def __post_init__(self) -> None:
        for name in ("rows", "distinct"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} is below 1; give at least 1")
        if not self.concurrency or min(self.concurrency) < 1:
            raise ConfigError(f"concurrency={list(self.concurrency)} must be numbers from 1")
        for name in ("seconds", "timeout"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)} leaves no time; give seconds")
        for name in ("warmup_seconds", "processes"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)} is negative; 0 is the least")
        if self.input is not None and self.shape:
            raise ConfigError("input and shape are two ways to say what to send; leave one out")
        self.shapes()
        _ = self.address

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes by the inputs' names."""
        found = {}
        for text in self.shape:
            match = _SHAPE.fullmatch(text)
            if match is None:
                raise ConfigError(f"shape: {text!r} is not a shape of an input; write NAME:8,128")
            found[match[1]] = tuple(int(size) for size in match[2].split(","))
        return found

    @property
    def secure(self) -> bool:
        """Whether the connection is TLS."""
        return self.tls or self.url.startswith(("https://", "grpcs://"))

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the server."""
        return parse_server(self.url, _DEFAULT_URLS[self.protocol])

    def tls_context(self) -> ssl.SSLContext | None:
        """The TLS context; None for plain text. Raises ConfigError for a `ca` that is not a
        file."""
        if not self.secure:
            return None
        return tls_context(self.ca, self.insecure, self.cert, self.key)
