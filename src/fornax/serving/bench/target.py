"""The server that is measured: its metadata and statistics, and requests as bytes for the wire."""

import http.client
import json
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import quote

import numpy as np

from fornax.config import ConfigError, ServingCode, ServingError, environment
from fornax.serving.bench.config import HostBenchConfig
from fornax.serving.types import TensorMetadata
from fornax.serving.v2.datatypes import datatype_of, encode_raw

__all__ = ["HttpTarget", "Statistics", "Target", "make_target", "tls_context"]


@dataclass(frozen=True, slots=True)
class Statistics:
    """A model's counters since it was loaded; durations in nanoseconds, summed over requests."""

    requests: int = 0
    rows: int = 0
    batches: int = 0
    total: int = 0
    queue: int = 0
    compute_input: int = 0
    compute_infer: int = 0
    compute_output: int = 0

    def since(self, before: "Statistics") -> "Statistics":
        """What was added."""
        names = self.__slots__
        return Statistics(**{name: getattr(self, name) - getattr(before, name) for name in names})


class Target(Protocol):
    """A server under one protocol."""

    def inputs(self) -> list[TensorMetadata]:
        """The model's inputs; ServingError when there is no such model or no server."""

    def statistics(self) -> Statistics | None:
        """The model's counters; None when the server keeps none."""

    def encode(self, tensors: Mapping[str, np.ndarray]) -> bytes:
        """A request as it goes over the wire."""


def make_target(config: HostBenchConfig) -> Target:
    """The server that a config names."""
    if config.protocol == "http":
        return HttpTarget(config)
    from fornax.serving.bench.grpc_target import GrpcTarget

    return GrpcTarget(config)


def tls_context(config: HostBenchConfig) -> ssl.SSLContext | None:
    """How to speak TLS; None for plain text."""
    if not config.secure:
        return None
    if config.ca is not None and not config.ca.is_file():
        raise ConfigError(f"ca={config.ca} is no file; check the path")
    context = ssl.create_default_context(cafile=str(config.ca) if config.ca else None)
    if config.insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def sums(models: list[Mapping[str, Any]]) -> Statistics:
    """Add the counters of the statistics document's entries up."""
    total = dict.fromkeys(Statistics.__slots__, 0)
    for model in models:
        parts = model.get("inference_stats", {})
        total["rows"] += int(model.get("inference_count", 0))
        total["batches"] += int(model.get("execution_count", 0))
        total["requests"] += int(parts.get("success", {}).get("count", 0))
        total["total"] += int(parts.get("success", {}).get("ns", 0))
        for name in ("queue", "compute_input", "compute_infer", "compute_output"):
            total[name] += int(parts.get(name, {}).get("ns", 0))
    return Statistics(**total)


class HttpTarget:
    """The V2 protocol over HTTP, binary tensors both ways."""

    def __init__(self, config: HostBenchConfig):
        self._config = config
        self._host, self._port = config.address
        self._tls = tls_context(config)
        self._token = next(iter(environment.host_tokens()), None)
        version = f"/versions/{quote(config.version, safe='')}" if config.version else ""
        self._path = f"/v2/models/{quote(config.model, safe=':')}{version}"

    def inputs(self) -> list[TensorMetadata]:
        """The model's inputs."""
        found = self._get(self._path)
        return [
            TensorMetadata(each["name"], each["datatype"], tuple(int(n) for n in each["shape"]))
            for each in found["inputs"]
        ]

    def statistics(self) -> Statistics | None:
        """The model's counters."""
        try:
            found = self._get(f"{self._path}/stats")
        except ServingError:
            return None
        return sums(found["model_stats"])

    def encode(self, tensors: Mapping[str, np.ndarray]) -> bytes:
        """A whole HTTP request."""
        raw = {name: bytes(encode_raw(array)) for name, array in tensors.items()}
        described = [
            {
                "name": name,
                "shape": list(array.shape),
                "datatype": datatype_of(array.dtype),
                "parameters": {"binary_data_size": len(raw[name])},
            }
            for name, array in tensors.items()
        ]
        parameters: dict[str, Any] = {"binary_data_output": True}
        if self._config.priority:
            parameters["priority"] = self._config.priority
        head = json.dumps({"inputs": described, "parameters": parameters}).encode()
        body = head + b"".join(raw.values())
        fields = {
            "Host": f"{self._host}:{self._port}",
            "Content-Type": "application/octet-stream",
            "Inference-Header-Content-Length": str(len(head)),
            "Content-Length": str(len(body)),
            **self._credentials(),
        }
        lines = [f"POST {self._path}/infer HTTP/1.1", *(f"{k}: {v}" for k, v in fields.items())]
        return "\r\n".join([*lines, "", ""]).encode() + body

    def _credentials(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._token}"} if self._token else {}

    def _get(self, path: str) -> dict[str, Any]:
        timeout = self._config.timeout
        if self._tls:
            connection = http.client.HTTPSConnection(
                self._host, self._port, timeout=timeout, context=self._tls
            )
        else:
            connection = http.client.HTTPConnection(self._host, self._port, timeout=timeout)
        try:
            connection.request("GET", path, headers=self._credentials())
            answer = connection.getresponse()
            body = answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise ServingError(
                ServingCode.UNAVAILABLE,
                f"no server answers at {self._host}:{self._port} ({error or 'it hung up'}); start "
                "one with fornax host, or name another with --url",
            ) from error
        finally:
            connection.close()
        try:
            found = json.loads(body)
        except ValueError:
            found = None
        if answer.status != 200 or not isinstance(found, dict):
            said = found.get("error") if isinstance(found, dict) else body[:200].decode("latin-1")
            raise ServingError(
                ServingCode.UNAVAILABLE, f"GET {path} was answered {answer.status}: {said}"
            )
        return found
