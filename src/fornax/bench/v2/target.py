"""The V2 server under load: its metadata and statistics, requests as bytes, and their answers."""

import asyncio
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from fornax.bench.connection import ConnectionLostError, Pool, error_message, request_bytes
from fornax.bench.v2.config import HostBenchConfig
from fornax.config import ServingError, environment
from fornax.serving.client import V2Client, model_path
from fornax.serving.types import TensorMetadata
from fornax.serving.v2.datatypes import datatype_of, encode_raw

__all__ = ["Failure", "HttpTarget", "Statistics", "Target", "add_up"]

_OK = 200
_PAUSE = 0.05
"""Seconds before a lost connection is opened again."""
_PARTS = ("queue", "compute_input", "compute_infer", "compute_output")


@dataclass(frozen=True, slots=True)
class Statistics:
    """A model's counters since it was loaded; durations in nanoseconds, summed over requests."""

    requests: int = 0
    rows: int = 0
    batches: int = 0
    queue: int = 0
    compute_input: int = 0
    compute_infer: int = 0
    compute_output: int = 0

    def since(self, before: "Statistics") -> "Statistics":
        """The difference to earlier counters."""
        names = self.__slots__
        return Statistics(**{name: getattr(self, name) - getattr(before, name) for name in names})


class Failure(NamedTuple):
    """Why a request has no answer."""

    reason: str
    """Short, to count by."""
    message: str


class Target(Protocol):
    """A server under one protocol."""

    def inputs(self) -> list[TensorMetadata]:
        """The inputs that the model needs; ServingError for no such model, or no server."""
        ...

    def statistics(self) -> Statistics | None:
        """The model's counters; None when the server keeps none."""

    def encode(self, tensors: Mapping[str, np.ndarray]) -> bytes:
        """A request as it goes over the wire."""
        ...

    async def connect(self, clients: int) -> None:
        """Open connections for this many clients; OSError when the server takes none."""

    async def send(self, request: bytes) -> Failure | None:
        """Send a request and wait for its answer; None when it succeeded."""

    async def close(self) -> None:
        """Close the connections."""


def add_up(models: Iterable[Mapping[str, Any]]) -> Statistics:
    """Sum the counters of the statistics document's entries."""
    total = dict.fromkeys(Statistics.__slots__, 0)
    for model in models:
        parts = model.get("inference_stats", {})
        total["rows"] += int(model.get("inference_count", 0))
        total["batches"] += int(model.get("execution_count", 0))
        total["requests"] += int(parts.get("success", {}).get("count", 0))
        for name in _PARTS:
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
        self._pool = Pool(
            *config.address, timeout=config.timeout, tls=self._client.tls, replace=False
        )

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
        return add_up(found["model_stats"])

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
        fields = {
            "Content-Type": "application/octet-stream",
            "Inference-Header-Content-Length": str(len(head)),
            **self._client.credentials(),
        }
        url = "http://{}:{}{}/infer".format(*self._config.address, self._path)
        return request_bytes("POST", url, headers=fields, body=head + b"".join(raw.values()))

    async def connect(self, clients: int) -> None:
        """Open a connection for each client."""
        await self._pool.connect(clients)

    async def send(self, request: bytes) -> Failure | None:
        """Send a request; a status other than 200 is a failure."""
        try:
            exchange = await self._pool.exchange(request)
        except TimeoutError:
            return Failure("timeout", f"no answer in {self._config.timeout:g} s")
        except OSError as error:
            await asyncio.sleep(_PAUSE)
            lost = isinstance(error, ConnectionLostError)
            return Failure("connection lost" if lost else "no connection", str(error))
        if exchange.status == _OK:
            return None
        return Failure(f"HTTP {exchange.status}", error_message(exchange.body))

    async def close(self) -> None:
        """Close the connections."""
        await self._pool.close()
