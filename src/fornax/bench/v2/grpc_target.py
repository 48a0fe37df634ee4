"""The V2 server under load, over gRPC: raw contents both ways, messages sent as bytes."""

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping

import grpc
import numpy as np
from google.protobuf import json_format

from fornax.bench.v2.config import HostBenchConfig
from fornax.bench.v2.target import Failure, Statistics, add_up
from fornax.config import ServingCode, ServingError, environment
from fornax.serving.grpc.client import Client, channel_credentials, infer_message
from fornax.serving.grpc.methods import METHODS
from fornax.serving.types import TensorMetadata

__all__ = ["GrpcTarget"]

_OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),
]
"""Messages of any size; each channel a connection of its own."""
_PER_CHANNEL = 16
"""Clients that share a connection."""
_PAUSE = 0.05
"""Seconds before a server that is not there is tried again."""


class GrpcTarget:
    """The V2 protocol over gRPC."""

    def __init__(self, config: HostBenchConfig):
        config.tls_context()  # says what is wrong with the files
        self._config = config
        self._address = "{}:{}".format(*config.address)
        token = next(iter(environment.host_tokens()), None)
        self._client = Client(
            self._address,
            token=token,
            tls=config.secure,
            ca=config.ca,
            cert=config.cert,
            key=config.key,
            timeout=config.timeout,
        )
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self._channels: list[grpc.aio.Channel] = []
        self._calls: Iterator[Callable[..., Awaitable[bytes]]] = iter(())

    def inputs(self) -> list[TensorMetadata]:
        """The model's inputs."""
        try:
            return list(self._client.metadata(self._config.model, self._config.version).inputs)
        except ServingError as error:
            raise ServingError(
                ServingCode.UNAVAILABLE,
                f"ModelMetadata at {self._address} was answered {error.code.name}: {error}; is "
                "the server there, and its gRPC on this port? Name another with --url",
            ) from error

    def statistics(self) -> Statistics | None:
        """The model's counters."""
        named = {"name": self._config.model, "version": self._config.version}
        try:
            found = self._client.call("ModelStatistics", **named)
        except ServingError:
            return None
        document = json_format.MessageToDict(found, preserving_proto_field_name=True)
        return add_up(document.get("model_stats", []))

    def encode(self, tensors: Mapping[str, np.ndarray]) -> bytes:
        """The message of a request."""
        return infer_message(
            self._config.model,
            tensors,
            version=self._config.version,
            parameters=self._config.parameters,
        ).SerializeToString()

    async def connect(self, clients: int) -> None:
        """Open channels, each with a connection of its own."""
        for _ in range(-(-clients // _PER_CHANNEL)):
            self._channels.append(self._channel())
        try:
            async with asyncio.timeout(self._config.timeout):
                for channel in self._channels:
                    await channel.channel_ready()
        except TimeoutError:
            raise ConnectionError(f"no connection within {self._config.timeout:g} s") from None
        path = METHODS["ModelInfer"].path
        self._calls = itertools.cycle([each.unary_unary(path) for each in self._channels])

    def _channel(self) -> grpc.aio.Channel:
        config = self._config
        if not config.secure:
            return grpc.aio.insecure_channel(self._address, _OPTIONS)
        credentials = channel_credentials(config.ca, config.cert, config.key)
        return grpc.aio.secure_channel(self._address, credentials, _OPTIONS)

    async def send(self, request: bytes) -> Failure | None:
        """Send a request; a status other than OK is a failure."""
        sent, limit = time.perf_counter(), self._config.timeout
        try:
            await next(self._calls)(request, timeout=limit, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            timed_out = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            local = timed_out and time.perf_counter() - sent >= limit
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                await asyncio.sleep(_PAUSE)
            return Failure("timeout" if local else error.code().name, error.details() or "")
        return None

    async def close(self) -> None:
        """Close the channels."""
        for channel in self._channels:
            await channel.close()
