"""Descriptors of messages from tables, in place of generated code.

Generated code asks for the protobuf it was generated with; a client library in the same
environment often brings another. What is built from tables works under each.
"""

import re
from collections.abc import Mapping
from typing import Any

from google.protobuf import descriptor_pb2

__all__ = ["add_method", "file"]

_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    name: getattr(_Field, f"TYPE_{name.upper()}")
    for name in ("bool", "bytes", "double", "float", "int32", "int64", "string", "uint32", "uint64")
}


class _Tables:
    """The messages and enumerations of one package."""

    def __init__(self, package: str, enums: Mapping[str, Any], oneofs: Mapping[str, str]):
        self.package = package
        self.enums = enums
        self.oneofs = oneofs

    def set_type(self, field: Any, kind: str) -> None:
        if kind in _SCALARS:
            field.type = _SCALARS[kind]
            return
        field.type = _Field.TYPE_ENUM if kind in self.enums else _Field.TYPE_MESSAGE
        field.type_name = f".{self.package}.{kind}"

    def add_map(self, owner: Any, path: str, name: str, kind: str) -> str:
        """Add the entry message of a map from strings; return its name."""
        camel = "".join(part.capitalize() for part in name.split("_"))
        entry = owner.nested_type.add(name=f"{camel}Entry")
        entry.options.map_entry = True
        entry.field.add(name="key", number=1, type=_Field.TYPE_STRING, label=_Field.LABEL_OPTIONAL)
        value = entry.field.add(name="value", number=2, label=_Field.LABEL_OPTIONAL)
        self.set_type(value, kind)
        return f"{path}.{entry.name}"

    def fill(self, owner: Any, path: str, fields: str) -> None:
        """Add the fields of a message's line in the table to its descriptor."""
        oneofs: dict[str, int] = {}
        for number, name, form, kind in re.findall(r"(\d+) (\w+) (\*|\{\}|\w+\|)?([\w.]+)", fields):
            field = owner.field.add(name=name, number=int(number), label=_Field.LABEL_OPTIONAL)
            if form in ("*", "{}"):
                field.label = _Field.LABEL_REPEATED
            if form == "{}":
                kind = self.add_map(owner, path, name, kind)
            elif form.endswith("|"):
                if form not in oneofs:
                    oneofs[form] = len(owner.oneof_decl)
                    owner.oneof_decl.add(name=self.oneofs.get(path, "parameter_choice"))
                field.oneof_index = oneofs[form]
            self.set_type(field, kind)


def file(
    name: str,
    package: str,
    messages: Mapping[str, str],
    enums: Mapping[str, tuple[str, ...]] | None = None,
    *,
    known: Mapping[str, Any] | None = None,
    oneofs: Mapping[str, str] | None = None,
) -> Any:
    """The descriptor of a file; `known` are enumerations that another file of the package has."""
    made = descriptor_pb2.FileDescriptorProto(name=name, package=package, syntax="proto3")
    enums = enums or {}
    tables = _Tables(package, {**(known or {}), **enums}, oneofs or {})
    owners: dict[str, Any] = {}
    for path in messages:
        outer, _, own = path.rpartition(".")
        owners[path] = (owners[outer].nested_type if outer else made.message_type).add(name=own)
    for path, fields in messages.items():
        tables.fill(owners[path], path, fields)
    for path, values in enums.items():
        outer, _, own = path.rpartition(".")
        enum = (owners[outer] if outer else made).enum_type.add(name=own)
        for number, value in enumerate(values):
            enum.value.add(name=value, number=number)
    return made


def add_method(
    service: Any, package: str, name: str, types: tuple[str, str], streams: tuple[bool, bool]
) -> None:
    """Add a call to a service's descriptor: its types in and out, and which of them stream."""
    service.method.add(
        name=name,
        input_type=f".{package}.{types[0]}",
        output_type=f".{package}.{types[1]}",
        client_streaming=streams[0],
        server_streaming=streams[1],
    )
