"""The server that is measured, over gRPC: messages as bytes, so that the client costs little."""

from collections.abc import Mapping
from typing import Any

import grpc
import numpy as np

from fornax.config import ServingCode, ServingError, environment
from fornax.serving.bench.config import HostBenchConfig
from fornax.serving.bench.target import Statistics
from fornax.serving.grpc.messages import METHODS
from fornax.serving.types import TensorMetadata
from fornax.serving.v2.datatypes import datatype_of, encode_raw

__all__ = ["INFER", "OPTIONS", "GrpcTarget", "credentials", "metadata_of"]

INFER = METHODS["ModelInfer"].path
OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),
]
"""Messages of any size; each channel a connection of its own."""
_CHOICES = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}


def credentials(config: HostBenchConfig) -> grpc.ChannelCredentials | None:
    """How to speak TLS; None for plain text."""
    if not config.secure:
        return None
    config.tls_context()  # says what is wrong with the files
    key = config.key or config.cert
    return grpc.ssl_channel_credentials(
        config.ca.read_bytes() if config.ca else None,
        key.read_bytes() if key else None,
        config.cert.read_bytes() if config.cert else None,
    )


def metadata_of(token: str | None) -> tuple[tuple[str, str], ...]:
    """What goes with each call."""
    return (("authorization", f"Bearer {token}"),) if token else ()


class GrpcTarget:
    """The V2 protocol over gRPC, raw contents both ways."""

    def __init__(self, config: HostBenchConfig):
        self._config = config
        self._address = "{}:{}".format(*config.address)
        self._metadata = metadata_of(next(iter(environment.host_tokens()), None))
        self._named = {"name": config.model, "version": config.version}

    def inputs(self) -> list[TensorMetadata]:
        """The model's inputs."""
        found = self._call("ModelMetadata", **self._named)
        return [
            TensorMetadata(each.name, each.datatype, tuple(each.shape)) for each in found.inputs
        ]

    def statistics(self) -> Statistics | None:
        """The model's counters."""
        try:
            found = self._call("ModelStatistics", **self._named)
        except ServingError:
            return None
        total = dict.fromkeys(Statistics.__slots__, 0)
        for model in found.model_stats:
            parts = model.inference_stats
            total["rows"] += model.inference_count
            total["batches"] += model.execution_count
            total["requests"] += parts.success.count
            total["total"] += parts.success.ns
            for name in ("queue", "compute_input", "compute_infer", "compute_output"):
                total[name] += getattr(parts, name).ns
        return Statistics(**total)

    def encode(self, tensors: Mapping[str, np.ndarray]) -> bytes:
        """The message of a request."""
        request = METHODS["ModelInfer"].request(
            model_name=self._config.model, model_version=self._config.version
        )
        for name, value in self._config.parameters.items():
            setattr(request.parameters[name], _CHOICES[type(value)], value)
        for name, array in tensors.items():
            tensor = request.inputs.add(name=name, datatype=datatype_of(array.dtype))
            tensor.shape.extend(array.shape)
            request.raw_input_contents.append(bytes(encode_raw(array)))
        return request.SerializeToString()

    def _call(self, method_name: str, **fields: str) -> Any:
        method = METHODS[method_name]
        secure = credentials(self._config)
        channel = (
            grpc.secure_channel(self._address, secure, OPTIONS)
            if secure
            else grpc.insecure_channel(self._address, OPTIONS)
        )
        with channel:
            call = channel.unary_unary(
                method.path,
                request_serializer=method.request.SerializeToString,
                response_deserializer=method.response.FromString,
            )
            try:
                return call(
                    method.request(**fields), timeout=self._config.timeout, metadata=self._metadata
                )
            except grpc.RpcError as error:
                raise ServingError(
                    ServingCode.UNAVAILABLE,
                    f"{method_name} at {self._address} was answered {error.code().name}: "  # pyrefly: ignore[missing-attribute]
                    f"{error.details()}; is the server there, and its gRPC on this port? Name "  # pyrefly: ignore[missing-attribute]
                    "another with --url",
                ) from error
