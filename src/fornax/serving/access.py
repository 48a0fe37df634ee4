"""What the protocols allow and whom: sizes and times, tokens, the certificate."""

import dataclasses
import functools
import hmac
from pathlib import Path

from fornax.config.errors import ConfigError

__all__ = ["Auth", "Limits", "Tls", "read_tokens"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """Sizes, counts and times that a client is held to."""

    max_body_bytes: int = 256 * 1024 * 1024
    """Largest request, binary tensors included; a larger one gets 413 or RESOURCE_EXHAUSTED."""
    max_tensor_bytes: int = 128 * 1024 * 1024
    """Largest tensor of a request, as an array."""
    max_tensors: int = 256
    """Most tensors of a request, inputs and outputs each."""
    max_header_bytes: int = 64 * 1024
    """Largest head of an HTTP request; a larger one gets 431."""
    header_timeout: float = 15.0
    """Seconds in which the head of an HTTP request must arrive, else the connection is closed."""
    body_timeout: float = 60.0
    """Seconds in which the body of an HTTP request must arrive, else 408."""
    send_timeout: float = 60.0
    """Seconds that a client may take no data that waits for it; then its connection is closed."""
    keep_alive: float = 75.0
    """Seconds that an idle connection is kept."""
    max_connections: int = 4096
    """HTTP connections open at once; more get 503."""
    max_concurrent_requests: int = 8192
    """Inferences being answered at once, HTTP and gRPC each; more get 429."""
    request_timeout: float = 0.0
    """Seconds an inference may take, 504 after them; 0 for no limit. A request may ask for less."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(Limits):
            value = getattr(self, field.name)
            if field.name == "request_timeout":
                if not value >= 0:
                    raise ConfigError(f"request_timeout={value} is negative; 0 is the least")
            elif field.type in (int, "int") and value < 1:
                raise ConfigError(f"{field.name}={value} is below 1; give at least 1")
            elif not value > 0:
                raise ConfigError(f"{field.name}={value} leaves no time; give seconds")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Auth:
    """The tokens of which a client must present one; none: everybody may call."""

    tokens: tuple[str, ...] = dataclasses.field(default=(), repr=False)
    open_metrics: bool = True
    """Whether the metrics need none; health and readiness never do."""

    @property
    def enabled(self) -> bool:
        """Whether a token is needed."""
        return bool(self.tokens)

    @functools.cached_property
    def _secrets(self) -> tuple[bytes, ...]:
        return tuple(token.encode() for token in self.tokens)

    def admits(self, header: str | bytes | None) -> bool:
        """Whether the value of an `authorization` header or metadatum carries a token."""
        if not self.tokens:
            return True
        value = header.encode("utf-8", "replace") if isinstance(header, str) else header or b""
        scheme, _, token = value.partition(b" ")
        # Every token is compared, so that the time tells nothing.
        fits = [hmac.compare_digest(token.strip(), known) for known in self._secrets]
        return scheme.lower() == b"bearer" and any(fits)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tls:
    """A certificate, its key, and the authority of the clients' certificates."""

    cert: Path
    key: Path
    client_ca: Path | None = None
    """None: clients need no certificate."""


def read_tokens(name: str, path: Path) -> list[str]:
    """The tokens of a file, one per line; lines that begin with # are none.

    Args:
      name: of the option that names the file, for errors.

    Raises:
      ConfigError: a file that cannot be read, or has no token.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"{name}={path} cannot be read: {reason}; check the path") from error
    tokens = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if not tokens:
        raise ConfigError(f"{name}={path} has no token; write one per line, or leave it out")
    return tokens
