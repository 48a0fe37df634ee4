"""The server that is measured: its metadata and statistics, and requests as bytes for the wire."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from fornax.config import ServingError, environment
from fornax.serving.bench.config import HostBenchConfig
from fornax.serving.client import V2Client, model_path
from fornax.serving.types import TensorMetadata
from fornax.serving.v2.datatypes import datatype_of, encode_raw

__all__ = ["HttpTarget", "Statistics", "Target", "make_target"]


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
        """The inputs that the model needs; ServingError for no such model, or no server."""

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


def _sums(models: list[Mapping[str, Any]]) -> Statistics:
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
        self._client = V2Client(
            address=config.address,
            tls=config.tls_context(),
            token=next(iter(environment.host_tokens()), None),
            timeout=config.timeout,
        )
        self._path = model_path(config.model, config.version)

    def inputs(self) -> list[TensorMetadata]:
        """The model's inputs."""
        found = self._client.get(self._path)
        optional = self._optional()
        return [
            TensorMetadata(each["name"], each["datatype"], tuple(int(n) for n in each["shape"]))
            for each in found["inputs"]
            if each["name"] not in optional
        ]

    def _optional(self) -> set[str]:
        """Inputs that the model's configuration says may be left out."""
        try:
            found = self._client.get(f"{self._path}/config")
        except ServingError:  # a server without this extension
            return set()
        return {each["name"] for each in found.get("input", []) if each.get("optional")}

    def statistics(self) -> Statistics | None:
        """The model's counters."""
        try:
            found = self._client.get(f"{self._path}/stats")
        except ServingError:
            return None
        return _sums(found["model_stats"])

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
        parameters = {"binary_data_output": True, **self._config.parameters}
        head = json.dumps({"inputs": described, "parameters": parameters}).encode()
        body = head + b"".join(raw.values())
        fields = {
            "Host": "{}:{}".format(*self._config.address),
            "Content-Type": "application/octet-stream",
            "Inference-Header-Content-Length": str(len(head)),
            "Content-Length": str(len(body)),
            **self._client.credentials(),
        }
        lines = [f"POST {self._path}/infer HTTP/1.1", *(f"{k}: {v}" for k, v in fields.items())]
        return "\r\n".join([*lines, "", ""]).encode() + body
