"""The protocol's message classes, built from tables at import, in a descriptor pool of our own.

A pool of our own, so that a client library whose generated code names the same files and messages
can live in the same process.
"""

from typing import Any

from google.protobuf import descriptor_pool, message_factory

from fornax.serving.grpc import _tables
from fornax.serving.grpc.descriptors import add_method, file

__all__ = ["METHODS", "PACKAGE", "POOL", "SERVICE", "SERVICE_FILE", "Method", "message"]

PACKAGE = "inference"
SERVICE = f"{PACKAGE}.GRPCInferenceService"
_CONFIG_FILE = "model_config.proto"
SERVICE_FILE = "grpc_service.proto"


class Method:
    """One call of the service: its path, and the classes of what goes in and out."""

    def __init__(self, name: str):
        self.name = name
        self.path = f"/{SERVICE}/{name}"
        self.streams = name == "ModelStreamInfer"
        request, response = _types(name)
        self.request = message(request)
        self.response = message(response)


def _types(method: str) -> tuple[str, str]:
    """The names of a method's request and response."""
    request = "ModelInfer" if method == "ModelStreamInfer" else method
    return f"{request}Request", f"{method}Response"


_ONEOFS = {"ModelVersionPolicy": "policy_choice", "ModelConfig": "scheduling_choice"}


def _build() -> descriptor_pool.DescriptorPool:
    """A pool with the two files of the protocol."""
    enums = _tables.CONFIG_ENUMS
    config = file(_CONFIG_FILE, PACKAGE, _tables.CONFIG_MESSAGES, enums, oneofs=_ONEOFS)
    service = file(SERVICE_FILE, PACKAGE, _tables.SERVICE_MESSAGES, known=enums)
    service.dependency.append(_CONFIG_FILE)
    methods = service.service.add(name=SERVICE.rpartition(".")[2])
    for name in _tables.METHODS:
        streams = name == "ModelStreamInfer"
        add_method(methods, PACKAGE, name, _types(name), (streams, streams))
    pool = descriptor_pool.DescriptorPool()
    for each in (config, service):
        pool.AddSerializedFile(each.SerializeToString())
    return pool


POOL = _build()


def message(name: str) -> Any:
    """The class of a message of the protocol's, by its name without the package."""
    return message_factory.GetMessageClass(POOL.FindMessageTypeByName(f"{PACKAGE}.{name}"))


METHODS: dict[str, Method] = {name: Method(name) for name in _tables.METHODS}
