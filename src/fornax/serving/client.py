"""A thin client of the V2 protocol's JSON calls, for operators' commands and the load generator."""

import http.client
import json
import ssl
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fornax.config import ConfigError, ServingCode, ServingError
from fornax.serving.types import WAITING

__all__ = [
    "V2Client",
    "model_path",
    "not_served",
    "parse_server",
    "tls_context",
    "wait_until_ready",
]

_PAUSE = 0.2


def parse_server(url: str, default: str) -> tuple[str, int]:
    """Host and port of host:port, or of http(s)://host:port; ConfigError for anything else."""
    text = url.partition("://")[2] or url or default
    host, _, port = text.rstrip("/").rpartition(":")
    if not host or not port.isascii() or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"url={url!r} names no server; write host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)


def tls_context(
    ca: Path | None, insecure: bool, cert: Path | None = None, key: Path | None = None
) -> ssl.SSLContext:
    """The TLS context of a client.

    Args:
      ca: file of the authorities to trust; None: the system's.
      insecure: whether any certificate will do.
      cert: file of a certificate to present, with its key unless `key` has that.

    Raises:
      ConfigError: a file is not there, or is not a certificate.
    """
    for name, path in (("ca", ca), ("cert", cert), ("key", key)):
        if path is not None and not path.is_file():
            raise ConfigError(f"{name}={path} is not a file; check the path")
    context = ssl.create_default_context(cafile=str(ca) if ca else None)
    if insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if cert is not None:
        try:
            context.load_cert_chain(cert, key)
        except (ssl.SSLError, OSError) as error:
            raise ConfigError(f"cert={cert} with its key cannot be used: {error}") from error
    return context


def model_path(model: str, version: str = "") -> str:
    """The path of a model, or of one version of it."""
    tail = f"/versions/{quote(version, safe='')}" if version else ""
    return f"/v2/models/{quote(model, safe=':')}{tail}"


@dataclass(frozen=True, kw_only=True)
class V2Client:
    """One server over HTTP; a connection a call."""

    address: tuple[str, int]
    tls: ssl.SSLContext | None = None
    token: str | None = None
    timeout: float = 30.0
    started_by: str = "fornax host"
    """What starts such a server, for those who find none."""

    def credentials(self) -> dict[str, str]:
        """The authorization header, where there is a token."""
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}

    def get(self, path: str) -> Any:
        """GET JSON. Raises ServingError for no answer, and for any status but 200."""
        return self._call("GET", path, None)

    def post(self, path: str, body: object = None) -> Any:
        """POST JSON. Raises ServingError as `get` does."""
        return self._call("POST", path, {} if body is None else body)

    def status(self, path: str) -> int:
        """The status of GET alone. Raises ServingError for no answer."""
        return self._exchange("GET", path, None)[0]

    def _call(self, method: str, path: str, body: object) -> Any:
        status, answer = self._exchange(method, path, body)
        try:
            found = json.loads(answer) if answer else {}
        except ValueError:
            found = None
        if status != 200 or found is None:
            said = found.get("error") if isinstance(found, dict) else None
            if isinstance(said, dict):  # OpenAI's
                said = said.get("message")
            raise ServingError(
                _CODES.get(status, ServingCode.INTERNAL),
                str(said or f"{method} {path} was answered {status}: {answer[:200]!r}"),
            )
        return found

    def _exchange(self, method: str, path: str, body: object) -> tuple[int, bytes]:
        host, port = self.address
        if self.tls is not None:
            connection = http.client.HTTPSConnection(
                host, port, timeout=self.timeout, context=self.tls
            )
        else:
            connection = http.client.HTTPConnection(host, port, timeout=self.timeout)
        headers = self.credentials()
        if body is not None:
            headers["Content-Type"] = "application/json"
        try:
            sent = None if body is None else json.dumps(body).encode()
            connection.request(method, path, body=sent, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        except ssl.SSLCertVerificationError as error:
            raise ServingError(
                ServingCode.UNAVAILABLE,
                f"the certificate of {host}:{port} is not trusted ({error.verify_message}); name "
                "its authority with --ca FILE",
            ) from error
        except http.client.BadStatusLine as error:
            if isinstance(error, http.client.RemoteDisconnected):
                why = "it hung up"
            else:
                why = "what is there does not speak HTTP; is it the port of gRPC?"
            raise ServingError(
                ServingCode.UNAVAILABLE,
                f"no server answers at {host}:{port} ({why}); start one with "
                f"{self.started_by}, or name another with --url",
            ) from error
        except (OSError, http.client.HTTPException) as error:
            raise ServingError(
                ServingCode.UNAVAILABLE,
                f"no server answers at {host}:{port} ({error or 'it hung up'}); start one with "
                f"{self.started_by}, or name another with --url",
            ) from error
        finally:
            connection.close()


_CODES = {code.http: code for code in ServingCode}


def wait_until_ready(client: V2Client, seconds: float) -> bool:
    """Wait for a server to be reachable and ready; False as soon as it cannot become ready.

    That is when it lacks a model, and nothing loads any more or is still being copied.

    Raises:
      ServingError: none answers in time, or it refuses to say.
    """
    until, still = time.monotonic() + seconds, False
    while True:
        left = until - time.monotonic()
        try:
            if client.status("/v2/health/ready") == 200:
                return True
            # Seen twice, for the server may be between its last load and saying that it is ready.
            before, still = still, left > 0 and _still(client.post("/v2/repository/index"))
        except ServingError as error:
            if left <= 0 or error.code is not ServingCode.UNAVAILABLE:
                raise
            before = still = False
        if left <= 0 or (before and still):
            return False
        time.sleep(min(_PAUSE, max(left, 0.0)))


def _still(index: Sequence[Mapping[str, Any]]) -> bool:
    """Whether models are lacking, and none of their versions is on its way."""
    lacking = not_served(index)
    return bool(lacking) and not any(
        each["state"] == "LOADING" or str(each.get("reason", "")).startswith(WAITING)
        for each in lacking
    )


def not_served(index: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The lines of models of which no version is ready, and of what loads."""
    ready = {each["name"] for each in index if each["state"] == "READY"}
    return [each for each in index if each["state"] == "LOADING" or each["name"] not in ready]
