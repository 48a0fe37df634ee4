"""The protocol's message classes, built from tables at import, in a descriptor pool of our own.

A pool of our own, so that a client library whose generated code names the same files and messages
can live in the same process.
"""

import re
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from fornax.serving.grpc import _tables

__all__ = ["METHODS", "PACKAGE", "POOL", "SERVICE", "SERVICE_FILE", "Method", "message"]

PACKAGE = "inference"
SERVICE = f"{PACKAGE}.GRPCInferenceService"
_CONFIG_FILE = "model_config.proto"
SERVICE_FILE = "grpc_service.proto"
_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    name: getattr(_Field, f"TYPE_{name.upper()}")
    for name in ("bool", "bytes", "double", "float", "int32", "int64", "string", "uint32", "uint64")
}


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


def _camel(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))


def _set_type(field: Any, kind: str) -> None:
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
        return
    field.type = _Field.TYPE_ENUM if kind in _tables.CONFIG_ENUMS else _Field.TYPE_MESSAGE
    field.type_name = f".{PACKAGE}.{kind}"


def _add_map(owner: Any, path: str, name: str, kind: str) -> str:
    """Add the entry message of a map from strings; return its name."""
    entry = owner.nested_type.add(name=f"{_camel(name)}Entry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, type=_Field.TYPE_STRING, label=_Field.LABEL_OPTIONAL)
    value = entry.field.add(name="value", number=2, label=_Field.LABEL_OPTIONAL)
    _set_type(value, kind)
    return f"{path}.{entry.name}"


def _fill(owner: Any, path: str, fields: str) -> None:
    """Add the fields of a message's line in the table to its descriptor."""
    oneofs: dict[str, int] = {}
    for number, name, form, kind in re.findall(r"(\d+) (\w+) (\*|\{\}|\w+\|)?([\w.]+)", fields):
        field = owner.field.add(name=name, number=int(number), label=_Field.LABEL_OPTIONAL)
        if form in ("*", "{}"):
            field.label = _Field.LABEL_REPEATED
        if form == "{}":
            kind = _add_map(owner, path, name, kind)
        elif form.endswith("|"):
            if form not in oneofs:
                oneofs[form] = len(owner.oneof_decl)
                owner.oneof_decl.add(name=_ONEOFS.get(path, "parameter_choice"))
            field.oneof_index = oneofs[form]
        _set_type(field, kind)


_ONEOFS = {"ModelVersionPolicy": "policy_choice", "ModelConfig": "scheduling_choice"}


def _file(name: str, messages: dict[str, str], enums: dict[str, tuple[str, ...]]) -> Any:
    """The descriptor of a file of messages and enumerations."""
    file = descriptor_pb2.FileDescriptorProto(name=name, package=PACKAGE, syntax="proto3")
    owners: dict[str, Any] = {}
    for path in messages:
        outer, _, own = path.rpartition(".")
        owners[path] = (owners[outer].nested_type if outer else file.message_type).add(name=own)
    for path, fields in messages.items():
        _fill(owners[path], path, fields)
    for path, values in enums.items():
        outer, _, own = path.rpartition(".")
        enum = (owners[outer] if outer else file).enum_type.add(name=own)
        for number, value in enumerate(values):
            enum.value.add(name=value, number=number)
    return file


def _build() -> descriptor_pool.DescriptorPool:
    """A pool with the two files of the protocol."""
    config = _file(_CONFIG_FILE, _tables.CONFIG_MESSAGES, _tables.CONFIG_ENUMS)
    service = _file(SERVICE_FILE, _tables.SERVICE_MESSAGES, {})
    service.dependency.append(_CONFIG_FILE)
    methods = service.service.add(name=SERVICE.rpartition(".")[2])
    for name in _tables.METHODS:
        request, response = _types(name)
        streams = name == "ModelStreamInfer"
        methods.method.add(
            name=name,
            input_type=f".{PACKAGE}.{request}",
            output_type=f".{PACKAGE}.{response}",
            client_streaming=streams,
            server_streaming=streams,
        )
    pool = descriptor_pool.DescriptorPool()
    for file in (config, service):
        pool.AddSerializedFile(file.SerializeToString())
    return pool


POOL = _build()


def message(name: str) -> Any:
    """The class of a message of the protocol's, by its name without the package."""
    return message_factory.GetMessageClass(POOL.FindMessageTypeByName(f"{PACKAGE}.{name}"))


METHODS: dict[str, Method] = {name: Method(name) for name in _tables.METHODS}
