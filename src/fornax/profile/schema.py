"""Protobuf messages described at run time: no generated code, no TensorFlow. Here are those of
captures and of compiled programs.

Field numbers are those of `xplane.proto` (tsl/profiler/protobuf) and `hlo.proto` (xla/service) of
openxla/xla. Fields that are not read are left out and survive unread.
"""

from collections.abc import Mapping
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

__all__ = ["HloProto", "XSpace", "message_classes"]

_FIELD = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "bool": _FIELD.TYPE_BOOL,
    "bytes": _FIELD.TYPE_BYTES,
    "double": _FIELD.TYPE_DOUBLE,
    "fixed64": _FIELD.TYPE_FIXED64,
    "int32": _FIELD.TYPE_INT32,
    "int64": _FIELD.TYPE_INT64,
    "string": _FIELD.TYPE_STRING,
    "uint32": _FIELD.TYPE_UINT32,
    "uint64": _FIELD.TYPE_UINT64,
}
_MESSAGES = {
    "XSpace": "1 planes *XPlane, 2 errors *string, 3 warnings *string, 4 hostnames *string",
    "XPlane": (
        "1 id int64, 2 name string, 3 lines *XLine, 4 event_metadata *EventMetadataEntry, "
        "5 stat_metadata *StatMetadataEntry, 6 stats *XStat"
    ),
    "EventMetadataEntry": "1 key int64, 2 value XEventMetadata",
    "StatMetadataEntry": "1 key int64, 2 value XStatMetadata",
    "XLine": (
        "1 id int64, 2 name string, 3 timestamp_ns int64, 4 events *XEvent, 9 duration_ps int64, "
        "10 display_id int64, 11 display_name string"
    ),
    "XEvent": "1 metadata_id int64, 2 offset_ps int64, 3 duration_ps int64, 4 stats *XStat",
    "XStat": (
        "1 metadata_id int64, 2 double_value |double, 3 uint64_value |uint64, "
        "4 int64_value |int64, 5 str_value |string, 6 bytes_value |bytes, 7 ref_value |uint64"
    ),
    "XEventMetadata": (
        "1 id int64, 2 name string, 3 metadata bytes, 4 display_name string, 5 stats *XStat, "
        "6 child_id *int64"
    ),
    "XStatMetadata": "1 id int64, 2 name string, 3 description string",
    "HloProto": "1 hlo_module HloModule, 3 buffer_assignment BufferAssignment",
    "HloModule": "1 name string, 3 computations *HloComputation",
    "HloComputation": "1 name string, 2 instructions *HloInstruction",
    "HloInstruction": "1 name string, 35 id int64",
    "BufferAssignment": (
        "1 logical_buffers *LogicalBuffer, 3 buffer_allocations *BufferAllocation, "
        "4 heap_simulator_traces *HeapTrace"
    ),
    "LogicalBuffer": "1 id int64, 2 size int64, 3 defined_at Location, 4 color int64",
    "Location": "2 instruction_name string, 3 shape_index *int64, 4 instruction_id int64",
    "BufferAllocation": (
        "1 index int64, 2 size int64, 3 is_thread_local bool, 5 is_entry_computation_parameter "
        "bool, 6 parameter_number int64, 7 maybe_live_out bool, 8 color int64, 9 assigned "
        "*Assigned, 10 parameter_shape_index *int64, 12 is_constant bool"
    ),
    "Assigned": "1 logical_buffer_id int64, 2 offset int64, 3 size int64",
    "HeapTrace": "1 events *HeapEvent, 2 whole_module bool, 3 buffer_allocation_index int64",
    "HeapEvent": (
        "1 kind int64, 2 buffer_id int64, 3 computation_name string, 4 instruction_name string, "
        "5 share_with_canonical_id int64"
    ),
}


def message_classes(package: str, messages: Mapping[str, str]) -> dict[str, Any]:
    """Classes of messages by name.

    Args:
      package: of the messages, not to be that of others.
      messages: name -> fields as "number name type", with commas between them; `*` before a type
        marks repeated fields, `+` repeated numbers that are not packed, `|` members of the oneof
        `value`, which alone tell zero from nothing.
    """
    file = descriptor_pb2.FileDescriptorProto(
        name=f"{package.replace('.', '/')}.proto", package=package, syntax="proto3"
    )
    for name, fields in messages.items():
        message = file.message_type.add(name=name)
        for text in fields.split(", "):
            number, field, kind = text.split()
            bare = kind.lstrip("*+|")
            label = _FIELD.LABEL_REPEATED if kind[0] in "*+" else _FIELD.LABEL_OPTIONAL
            added = message.field.add(name=field, number=int(number), label=label)
            if bare in _SCALARS:
                added.type = _SCALARS[bare]
            else:
                added.type, added.type_name = _FIELD.TYPE_MESSAGE, f".{package}.{bare}"
            if kind[0] == "+":
                added.options.packed = False
            if kind[0] == "|":
                if not message.oneof_decl:
                    message.oneof_decl.add(name="value")
                added.oneof_index = 0
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found = (pool.FindMessageTypeByName(f"{package}.{name}") for name in messages)
    return {each.name: message_factory.GetMessageClass(each) for each in found}


_CLASSES = message_classes("fornax.profile", _MESSAGES)
XSpace = _CLASSES["XSpace"]
"""What a profiler session writes: planes of lines of events."""
HloProto = _CLASSES["HloProto"]
"""A program and where the compiler placed its buffers; of the module, names and ids only."""
