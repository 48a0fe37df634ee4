"""Perfetto's traces read with descriptors of their own, as its trace processor does."""

import dataclasses
import gzip
from collections import defaultdict

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

__all__ = ["Slice", "Trace", "read_trace"]

PUBLISHED = """
Trace: repeated TracePacket packet 1
TracePacket: optional uint64 timestamp 8, optional uint32 timestamp_clock_id 58,
  optional uint32 trusted_packet_sequence_id 10, optional TrackEvent track_event 11,
  optional InternedData interned_data 12, optional uint32 sequence_flags 13,
  optional TrackDescriptor track_descriptor 60, optional bool first_packet_on_sequence 87
TrackDescriptor: optional uint64 uuid 1, optional uint64 parent_uuid 5, optional string name 2,
  optional ProcessDescriptor process 3, optional ThreadDescriptor thread 4,
  optional CounterDescriptor counter 8
ProcessDescriptor: optional int32 pid 1, repeated string cmdline 2, optional string process_name 6,
  optional int32 legacy_sort_index 3
ThreadDescriptor: optional int32 pid 1, optional int32 tid 2, optional string thread_name 5
CounterDescriptor: optional int32 unit 3, optional string unit_name 6
TrackEvent: repeated uint64 category_iids 3, optional uint64 name_iid 10, optional int32 type 9,
  optional uint64 track_uuid 11, optional int64 counter_value 30,
  optional double double_counter_value 44, repeated fixed64 flow_ids 47,
  repeated fixed64 terminating_flow_ids 48, repeated DebugAnnotation debug_annotations 4
DebugAnnotation: optional uint64 name_iid 1, optional double double_value 5,
  optional uint64 string_value_iid 17
InternedData: repeated EventCategory event_categories 1, repeated EventName event_names 2,
  repeated DebugAnnotationName debug_annotation_names 3,
  repeated InternedString debug_annotation_string_values 29
EventCategory: optional uint64 iid 1, optional string name 2
EventName: optional uint64 iid 1, optional string name 2
DebugAnnotationName: optional uint64 iid 1, optional string name 2
InternedString: optional uint64 iid 1, optional bytes str 2
"""
"""Of google/perfetto, protos/perfetto/trace, what a reader needs here."""
SLICE_BEGIN, SLICE_END, COUNTER = 1, 2, 4


def published_trace():
    """The message `Trace` as Perfetto publishes it."""
    file = descriptor_pb2.FileDescriptorProto(name="t.proto", package="published", syntax="proto2")
    field_type = descriptor_pb2.FieldDescriptorProto
    for line in PUBLISHED.strip().replace("\n  ", " ").splitlines():
        name, _, fields = line.partition(": ")
        message = file.message_type.add(name=name)
        for text in fields.split(", "):
            label, kind, field, number = text.split()
            added = message.field.add(name=field, number=int(number))
            added.label = field_type.Label.Value(f"LABEL_{label.upper()}")
            if kind[0].isupper():
                added.type, added.type_name = field_type.TYPE_MESSAGE, f".published.{kind}"
            else:
                added.type = field_type.Type.Value(f"TYPE_{kind.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("published.Trace"))


@dataclasses.dataclass
class Slice:
    track: int
    name: str
    category: str
    begin: int
    end: int
    arguments: dict
    flows: tuple
    ended_flows: tuple
    depth: int


@dataclasses.dataclass
class Trace:
    slices: list
    counters: list
    tracks: dict


def read_trace(path):
    """What Perfetto's trace processor makes of a file: slices by a stack for each track, names from
    the sequence's interned data."""
    data = path.read_bytes()
    trace = published_trace()()
    trace.ParseFromString(gzip.decompress(data) if path.suffix == ".gz" else data)
    interned, tracks, counters, slices = defaultdict(dict), {}, [], []
    open_ = defaultdict(list)
    events = []
    for number, packet in enumerate(trace.packet):
        assert packet.trusted_packet_sequence_id == 1
        assert packet.sequence_flags == (1 if number == 0 else 2)
        for field, values in packet.interned_data.ListFields():
            for value in values:
                text = value.str.decode() if field.number == 29 else value.name
                assert interned[field.name].setdefault(value.iid, text) == text
        if packet.HasField("track_descriptor"):
            tracks[packet.track_descriptor.uuid] = packet.track_descriptor
        if packet.HasField("track_event"):
            assert packet.HasField("timestamp")
            events.append(packet)
    for packet in sorted(events, key=lambda packet: packet.timestamp):
        event = packet.track_event
        assert event.track_uuid in tracks
        stack = open_[event.track_uuid]
        if event.type == SLICE_BEGIN:
            arguments = {}
            for one in event.debug_annotations:
                is_text = one.HasField("string_value_iid")
                strings = interned["debug_annotation_string_values"]
                arguments[interned["debug_annotation_names"][one.name_iid]] = (
                    strings[one.string_value_iid] if is_text else one.double_value
                )
            made = Slice(
                track=event.track_uuid,
                name=interned["event_names"][event.name_iid],
                category=interned["event_categories"][event.category_iids[0]],
                begin=packet.timestamp,
                end=-1,
                arguments=arguments,
                flows=tuple(event.flow_ids),
                ended_flows=tuple(event.terminating_flow_ids),
                depth=len(stack),
            )
            stack.append(made)
            slices.append(made)
        elif event.type == SLICE_END:
            stack.pop().end = packet.timestamp
        else:
            assert event.type == COUNTER
            kind = "counter_value" if event.HasField("counter_value") else "double_counter_value"
            assert event.HasField(kind)
            counters.append((tracks[event.track_uuid].name, packet.timestamp, getattr(event, kind)))
    assert not any(open_.values())
    return Trace(slices, counters, tracks)
