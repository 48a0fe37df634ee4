"""Our descriptor against those of Triton's client, compiled from the protocol's own files."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2
from tritonclient.grpc import model_config_pb2, service_pb2

from fornax.serving.grpc import inference_pb2


def _message(path: str, proto: Any) -> Iterator[tuple[str, object]]:
    yield path, bool(proto.options.map_entry)
    for field in proto.field:
        oneof = proto.oneof_decl[field.oneof_index].name if field.HasField("oneof_index") else None
        facts = (field.number, field.type, field.type_name, field.label, oneof)
        yield f"{path}.{field.name}", facts
    for nested in proto.nested_type:
        yield from _message(f"{path}.{nested.name}", nested)
    for enum in proto.enum_type:
        yield f"{path}.{enum.name}", [(value.name, value.number) for value in enum.value]


def _facts(descriptor: Any) -> dict[str, object]:
    """Everything that decides what goes over the wire, by its name."""
    proto = descriptor_pb2.FileDescriptorProto()
    descriptor.CopyToProto(proto)
    facts: dict[str, object] = {"syntax": proto.syntax, "package": proto.package}
    for each in proto.message_type:
        facts.update(_message(each.name, each))
    for enum in proto.enum_type:
        facts[enum.name] = [(value.name, value.number) for value in enum.value]
    for service in proto.service:
        for method in service.method:
            streams = method.client_streaming, method.server_streaming
            facts[f"{service.name}/{method.name}"] = method.input_type, method.output_type, streams
    return facts


def test_the_service_is_tritons_in_every_field_and_the_configuration_a_part_of_it():
    ours = _facts(inference_pb2.DESCRIPTOR)
    service = _facts(service_pb2.DESCRIPTOR)
    theirs = {**_facts(model_config_pb2.DESCRIPTOR), **service}
    assert ours == {name: theirs.get(name) for name in ours}
    assert service.keys() <= ours.keys()


def test_ours_and_tritons_live_in_one_process():
    assert inference_pb2.ModelInferRequest is not service_pb2.ModelInferRequest
    ours = inference_pb2.ModelInferRequest(model_name="m", raw_input_contents=[b"\0"])
    ours.parameters["priority"].uint64_param = 2
    theirs = service_pb2.ModelInferRequest.FromString(ours.SerializeToString())
    assert theirs.parameters["priority"].uint64_param == 2
    with pytest.raises(TypeError):
        theirs.CopyFrom(ours)


def test_the_descriptor_and_the_types_are_those_of_the_proto_file():
    path = Path(inference_pb2.__file__)
    written = re.findall(r"(\w+) = (\d+);", path.with_name("inference.proto").read_text())
    facts = _facts(inference_pb2.DESCRIPTOR)
    made = [
        (name.rpartition(".")[2], str(fact[0]))
        for name, fact in facts.items()
        if isinstance(fact, tuple) and "/" not in name and "Entry." not in name
    ]
    made += [
        (name, str(number))
        for fact in facts.values()
        if isinstance(fact, list)
        for name, number in fact
    ]
    assert sorted(made) == sorted(written), "inference.proto was changed; run make proto"
    stub = path.with_suffix(".pyi").read_text()
    assert all(f"    {name}: " in stub for name, _ in written)
