"""A small client of the V2 protocol over gRPC: numpy arrays in, numpy arrays out.

It speaks to any server of the protocol; `fornax.serving.client` speaks the HTTP side.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from google.protobuf.message import Message

from fornax.config.errors import ConfigError, ServingCode, ServingError
from fornax.serving.grpc import inference_pb2 as pb
from fornax.serving.grpc.codec import set_parameters
from fornax.serving.grpc.methods import METHODS
from fornax.serving.types import ModelMetadata, TensorMetadata
from fornax.serving.v2.datatypes import datatype_of, decode_raw, encode_raw

__all__ = ["Client", "channel_credentials", "infer_message", "outputs_of"]

_CODES = {code.grpc: code for code in ServingCode if code is not ServingCode.TOO_LARGE}
_ANY_SIZE = (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1))


def infer_message(
    model: str,
    inputs: Mapping[str, np.ndarray],
    *,
    outputs: Sequence[str] = (),
    version: str = "",
    id: str = "",  # noqa: A002
    parameters: Mapping[str, bool | int | float | str] | None = None,
) -> pb.ModelInferRequest:
    """A ModelInferRequest with its tensors raw.

    An array of strings, or of objects that are `bytes` or `str`, goes as BYTES.

    Raises:
      ValueError: an array whose dtype the protocol lacks.
    """
    message = pb.ModelInferRequest(model_name=model, model_version=version, id=id)
    set_parameters(message.parameters, parameters or {})
    for name, array in inputs.items():
        array = _little_endian(np.asarray(array))
        message.inputs.add(name=name, datatype=datatype_of(array.dtype), shape=array.shape)
        message.raw_input_contents.append(bytes(encode_raw(array)))
    for name in outputs:
        message.outputs.add(name=name)
    return message


def _little_endian(array: np.ndarray) -> np.ndarray:
    """The array in the wire's byte order; strings as objects that are bytes."""
    if array.dtype.kind in "OSU":
        flat = [each.encode() if isinstance(each, str) else each for each in array.ravel().tolist()]
        texts = np.empty(len(flat), np.object_)
        texts[:] = flat
        return texts.reshape(array.shape)
    return array.astype(array.dtype.newbyteorder("<"), copy=False)


def outputs_of(response: pb.ModelInferResponse) -> dict[str, np.ndarray]:
    """The raw tensors of a ModelInferResponse; views of it where they are numbers.

    Raises:
      ServingError: a tensor that is not what its datatype and shape say.
    """
    pairs = zip(response.outputs, response.raw_output_contents, strict=False)
    return {
        each.name: decode_raw(each.name, each.datatype, tuple(each.shape), data)
        for each, data in pairs
    }


class Client:
    """A connection to a server; a context manager, to be shared by threads."""

    def __init__(
        self,
        address: str,
        *,
        token: str | None = None,
        tls: bool = False,
        ca: Path | None = None,
        cert: Path | None = None,
        key: Path | None = None,
        timeout: float = 30.0,
    ):
        """Nothing is sent yet.

        Args:
          address: `host:port`, or `unix:PATH`.
          token: goes with each call.
          tls: encrypt, and check the server's certificate against the system's authorities.
          ca: encrypt, and check it against this file's.
          cert: encrypt, and present this file's certificate.
          key: file with its key; None: it is in the certificate's file.
          timeout: seconds that a call may take.

        Raises:
          ConfigError: a file cannot be read.
        """
        self._timeout = timeout
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        if tls or ca is not None or cert is not None:
            credentials = channel_credentials(ca, cert, key)
            self._channel = grpc.secure_channel(address, credentials, _ANY_SIZE)
        else:
            self._channel = grpc.insecure_channel(address, _ANY_SIZE)
        self._calls = {
            name: self._channel.unary_unary(
                method.path,
                request_serializer=method.request.SerializeToString,
                response_deserializer=method.response.FromString,
            )
            for name, method in METHODS.items()
            if not method.streams
        }

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()

    def infer(
        self,
        model: str,
        inputs: Mapping[str, np.ndarray],
        *,
        outputs: Sequence[str] = (),
        version: str = "",
        parameters: Mapping[str, bool | int | float | str] | None = None,
    ) -> dict[str, np.ndarray]:
        """Run the model on `inputs`; return all outputs, or those named.

        Args:
          model: its name; `NAME:FUNCTION` for another function than its first.
          version: a number or a label; empty: the model's default.

        Raises:
          ServingError: refused or failed, with the server's code and message.
        """
        message = infer_message(
            model, inputs, outputs=outputs, version=version, parameters=parameters
        )
        return outputs_of(self.send("ModelInfer", message))

    def ready(self, model: str = "", version: str = "") -> bool:
        """Whether the server, or one model of it, takes requests."""
        if not model:
            return self.call("ServerReady").ready
        return self.call("ModelReady", name=model, version=version).ready

    def metadata(self, model: str, version: str = "") -> ModelMetadata:
        """The model's versions and tensors. Raises ServingError where there is none."""
        found = self.call("ModelMetadata", name=model, version=version)
        inputs, outputs = (
            tuple(TensorMetadata(each.name, each.datatype, tuple(each.shape)) for each in tensors)
            for tensors in (found.inputs, found.outputs)
        )
        return ModelMetadata(found.name, tuple(found.versions), found.platform, inputs, outputs)

    def load(self, model: str, version: str = "") -> None:
        """Load a model, or one version; returns when it serves. Raises ServingError if not."""
        self._change("RepositoryModelLoad", model, version)

    def unload(self, model: str, version: str = "") -> None:
        """Unload a model, or one version. Raises ServingError where there is none."""
        self._change("RepositoryModelUnload", model, version)

    def _change(self, method: str, model: str, version: str) -> None:
        parameters = {"version": pb.ModelRepositoryParameter(string_param=version)}
        self.call(method, model_name=model, parameters=parameters if version else {})

    def call(self, method: str, **fields: Any) -> Any:
        """The answer's message of any call of the service, by its request's fields.

        Raises:
          ServingError: refused or failed.
        """
        return self.send(method, METHODS[method].request(**fields))

    def send(self, method: str, message: Message) -> Any:
        """As `call`, with the request's message. Raises ServingError."""
        try:
            return self._calls[method](message, timeout=self._timeout, metadata=self._metadata)
        except grpc.RpcError as error:
            raise _as_serving_error(error) from None


def _as_serving_error(error: Any) -> ServingError:
    code = _CODES.get(error.code().value[0], ServingCode.INTERNAL)
    return ServingError(code, error.details() or error.code().name)


def channel_credentials(
    ca: Path | None, cert: Path | None, key: Path | None
) -> grpc.ChannelCredentials:
    """TLS credentials from `Client`'s files. Raises ConfigError for one that cannot be read."""

    def read(name: str, path: Path | None) -> bytes | None:
        try:
            return None if path is None else path.read_bytes()
        except OSError as error:
            raise ConfigError(f"{name}={path} cannot be read: {error.strerror}") from None

    return grpc.ssl_channel_credentials(
        read("ca", ca), read("key", key or cert), read("cert", cert)
    )
