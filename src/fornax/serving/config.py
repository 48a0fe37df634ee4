"""The options of `fornax host`: where it listens, what it serves, what it allows."""

import dataclasses
import math
import re
from pathlib import Path
from typing import Literal

from fornax.config import ConfigError, environment
from fornax.serving.access import Auth, Limits, Tls, read_tokens

__all__ = ["Address", "HostConfig", "parse_address", "parse_bytes"]

_LOCAL = "127.0.0.1"
_NONE = "none"
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {f"{unit}i": 2 ** (10 * power) for power, unit in enumerate("kmgt", 1)}
_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", re.IGNORECASE)
_TIMES = {
    "poll_seconds": 0.05,
    "profile_max_seconds": 0.05,
    "drain_seconds": 0.0,
    "drain_delay_seconds": 0.0,
}


@dataclasses.dataclass(frozen=True)
class Address:
    """Where to listen; port 0 lets the system choose."""

    host: str
    port: int

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach it."""
        return self.host in ("localhost", "::1") or self.host.startswith("127.")

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostConfig(Limits):
    """The model server."""

    repository: Path | None = None
    """Folder of models: NAME/VERSION/ with a bundle each; the command's argument goes before."""
    http: int | str = 8080
    """Port or host:port of HTTP; 0 lets the system choose one, which is printed; none: no HTTP."""
    grpc: int | str = 8081
    """Port or host:port of gRPC; 0 lets the system choose one, which is printed; none: no gRPC."""

    control: Literal["poll", "explicit", "none"] = "poll"
    """How models change while serving: poll, as the repository does; explicit, by load and unload
    alone, with nothing loaded at the start but what load names; none, never."""
    poll_seconds: float = 2.0
    """Seconds between looks at the repository."""
    load: tuple[str, ...] = ()
    """Models to load at the start when control is explicit; * for all."""
    strict_readiness: bool = True
    """Whether the server is ready only when every model that should be served is."""
    exit_on_error: bool = False
    """Whether to stop, with exit code 1, when a model cannot be loaded at the start."""
    model_memory: str | None = None
    """Bytes that models may take of each device, such as 6GiB (default: a share of its memory)."""
    devices: tuple[int, ...] = ()
    """Numbers of the devices to serve on (default: all)."""
    grpc_compression: Literal["none", "deflate", "gzip"] = "none"
    """How answers over gRPC are compressed; over HTTP a client asks for it."""
    cpu_threads: int | None = None
    """Threads that a program on CPU devices is divided over (default: the cores; small programs run
    on one where that was faster when they were loaded)."""
    trust_executables: bool = False
    """Whether native code in bundles may be run; only for bundles from hands you trust."""

    token_file: Path | None = None
    """File of tokens, one per line, of which clients must present one as a bearer token; also read
    from FORNAX_HOST_TOKEN. Health stays open."""
    admin_token_file: Path | None = None
    """File of tokens for what changes the server: load, unload, rollback, shadow reports, profiles,
    shared memory (default: the tokens of all other calls). These tokens open everything."""
    allow_anonymous: bool = False
    """Whether other machines may load, unload and roll back models without a token: an address that
    they reach is refused otherwise."""
    open_metrics: bool = True
    """Whether /metrics needs no token."""
    tls_cert: Path | None = None
    """File with the TLS certificate chain, for HTTP and gRPC."""
    tls_key: Path | None = None
    """File with its key."""
    tls_client_ca: Path | None = None
    """File with the authority whose certificates clients must present (default: none needed)."""

    shared_memory: Literal["auto", "on", "off"] = "auto"
    """Whether clients may register system shared memory, so that this process reads and writes it
    for them; auto: only when every address is of this machine alone."""
    shared_memory_prefixes: tuple[str, ...] = ()
    """What the names of such regions must begin with (default: any name)."""

    log_format: Literal["text", "json"] = "text"
    """How lines of the log are written."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The least that is logged."""
    access_log: Literal["none", "errors", "all"] = "errors"
    """Which requests get a line with their id, model, times and outcome."""
    run_dir: Path | None = None
    """Directory to write what the server does to, a line every two seconds, for fornax ui."""
    trace_endpoint: str | None = None
    """Address of an OTLP collector over HTTP, such as http://127.0.0.1:4318/v1/traces."""
    trace_sample_rate: float = 0.01
    """Share of requests to trace, among those whose caller did not decide; from 0 to 1."""
    profile_dir: Path | None = None
    """Folder for profiles asked for by POST /v2/profile (default: that is refused)."""
    profile_max_seconds: float = 60.0
    """Longest time that a profile runs."""

    drain_delay_seconds: float = 0.0
    """Seconds after SIGTERM in which the server is not ready, but takes connections still, for
    balancers to notice."""
    drain_seconds: float = 30.0
    """Seconds that accepted requests get to finish after SIGTERM."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.http_address() is None and self.grpc_address() is None:
            raise ConfigError("http=none and grpc=none leave nothing to serve on; give one a port")
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ConfigError("tls_cert and tls_key are given together or not at all")
        if self.tls_client_ca and not self.tls_cert:
            raise ConfigError("tls_client_ca needs tls_cert and tls_key; give them too")
        for name, least in _TIMES.items():
            if not least <= getattr(self, name) < math.inf:
                raise ConfigError(
                    f"{name}={getattr(self, name)} is not from {least:g} seconds upwards"
                )
        if self.load and self.control != "explicit":
            raise ConfigError(
                f"load has an effect with control=explicit only, and control={self.control}; "
                "leave one of them out"
            )
        if not 0 <= self.trace_sample_rate <= 1:
            raise ConfigError(f"trace_sample_rate={self.trace_sample_rate} is not between 0 and 1")
        if len(set(self.devices)) < len(self.devices) or any(each < 0 for each in self.devices):
            raise ConfigError(
                f"devices={list(self.devices)} must be different numbers, from 0 upwards"
            )
        if self.cpu_threads is not None and self.cpu_threads < 1:
            raise ConfigError(f"cpu_threads={self.cpu_threads} must be 1 or more")
        self.model_memory_bytes()

    def folder(self) -> Path:
        """The repository; ConfigError where there is none."""
        if self.repository is None or not self.repository.is_dir():
            raise ConfigError(
                f"{self.repository or 'the repository'} is not a folder; name one that has models "
                "as NAME/VERSION/, such as fornax host models/"
            )
        return self.repository

    def http_address(self) -> Address | None:
        """Where HTTP listens; None: nowhere."""
        return parse_address("http", self.http)

    def grpc_address(self) -> Address | None:
        """Where gRPC listens; None: nowhere."""
        return parse_address("grpc", self.grpc)

    def model_memory_bytes(self) -> int | None:
        """Bytes that models may take of each device; None: the default share."""
        return None if self.model_memory is None else parse_bytes("model_memory", self.model_memory)

    def limits(self) -> Limits:
        """What HTTP and gRPC allow."""
        names = [field.name for field in dataclasses.fields(Limits)]
        return Limits(**{name: getattr(self, name) for name in names})

    def auth(self) -> Auth:
        """Who may call; reads the file of tokens and the environment.

        Raises ConfigError for a file that is not there, or has no token.
        """
        tokens = list(environment.host_tokens())
        if self.token_file is not None:
            tokens += read_tokens("token_file", self.token_file)
        if tokens and self.admin_token_file is not None:
            tokens += read_tokens("admin_token_file", self.admin_token_file)
        return Auth(tokens=tuple(dict.fromkeys(tokens)), open_metrics=self.open_metrics)

    def admin_auth(self) -> Auth | None:
        """Who may change the server; None: every caller.

        Raises ConfigError for a file that is not there, or has no token.
        """
        if self.admin_token_file is None:
            return None
        tokens = read_tokens("admin_token_file", self.admin_token_file)
        return Auth(tokens=tuple(dict.fromkeys(tokens)))

    def check_access(self) -> None:
        """ConfigError where anybody on the network could change the server."""
        if self.allow_anonymous or self.tls_client_ca or self._is_local():
            return
        if not (self.admin_auth() or self.auth()).enabled:
            open_to_all = [
                f"{name}={getattr(self, name)}"
                for name, address in (("http", self.http_address()), ("grpc", self.grpc_address()))
                if address is not None and not address.is_local
            ]
            raise ConfigError(
                f"{' and '.join(open_to_all)} can be reached from other machines, and without a "
                "token anybody there may load, unload and roll back models; give --token-file, "
                "--admin-token-file or --tls-client-ca, or allow it with --allow-anonymous"
            )

    def shared_memory_allowed(self) -> bool:
        """Whether clients may register shared memory."""
        return self._is_local() if self.shared_memory == "auto" else self.shared_memory == "on"

    def _is_local(self) -> bool:
        addresses = (self.http_address(), self.grpc_address())
        return all(address is None or address.is_local for address in addresses)

    def tls(self) -> Tls | None:
        """The certificate; None for plain text. Raises ConfigError for a file that is not there."""
        if self.tls_cert is None or self.tls_key is None:
            return None
        for name in ("tls_cert", "tls_key", "tls_client_ca"):
            path = getattr(self, name)
            if path is not None and not path.is_file():
                raise ConfigError(f"{name}={path} is not a file; check the path")
        return Tls(cert=self.tls_cert, key=self.tls_key, client_ca=self.tls_client_ca)


def parse_address(name: str, text: int | str) -> Address | None:
    """Read a port or host:port; None for `none`. ConfigError for anything else."""
    words = str(text)
    if words == _NONE:
        return None
    host, colon, port = words.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not port.isascii() or not port.isdecimal() or int(port) > 65535 or (colon and not host):
        raise ConfigError(
            f"{name}={words!r} is not an address; give a port up to 65535, host:port, or none"
        )
    return Address(host or _LOCAL, int(port))


def parse_bytes(name: str, text: str) -> int:
    """Read a size such as 6GiB, 800MB or 1000000; ConfigError for anything else, and for 0."""
    match = _BYTES.fullmatch(text.strip())
    size = round(float(match[1]) * _UNITS[(match[2] or "").lower()]) if match else 0
    if size < 1:
        raise ConfigError(
            f"{name}={text!r} is not a size; write bytes, or a number and MB, GB or GiB"
        )
    return size
