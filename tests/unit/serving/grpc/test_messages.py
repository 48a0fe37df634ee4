"""Our descriptors against those of Triton's client, compiled from the protocol's own files."""

from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from tritonclient.grpc import model_config_pb2, service_pb2

from fornax.serving.grpc import standard
from fornax.serving.grpc.messages import METHODS, POOL, message


def _proto(descriptor: Any) -> descriptor_pb2.FileDescriptorProto:
    if isinstance(descriptor, descriptor_pb2.FileDescriptorProto):
        return descriptor
    proto = descriptor_pb2.FileDescriptorProto()
    descriptor.CopyToProto(proto)
    return proto


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
    proto = _proto(descriptor)
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


def test_the_service_is_tritons_in_every_field():
    assert _facts(POOL.FindFileByName("grpc_service.proto")) == _facts(service_pb2.DESCRIPTOR)


def test_the_model_configuration_is_a_part_of_tritons():
    ours = _facts(POOL.FindFileByName("model_config.proto"))
    theirs = _facts(model_config_pb2.DESCRIPTOR)
    assert ours == {name: theirs.get(name) for name in ours}
    assert len(ours) > 50


def test_ours_and_tritons_live_in_one_process():
    assert message("ModelInferRequest") is not service_pb2.ModelInferRequest
    ours = METHODS["ModelInfer"].request(model_name="m", raw_input_contents=[b"\0"])
    ours.parameters["priority"].uint64_param = 2
    theirs = service_pb2.ModelInferRequest.FromString(ours.SerializeToString())
    assert theirs.parameters["priority"].uint64_param == 2
    with pytest.raises(TypeError):
        theirs.CopyFrom(ours)


@pytest.mark.parametrize("theirs", [health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR])
def test_the_standard_services_are_as_generated(theirs):
    ours = next(each for each in standard.FILES if each.package == theirs.package)
    assert _facts(ours) == _facts(theirs)
