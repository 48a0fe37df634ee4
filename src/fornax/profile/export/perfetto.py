"""A capture as a trace that Perfetto (ui.perfetto.dev) opens: its own protobuf, TracePackets.

A process for each rank's host and each of its devices, a thread for each row, a track of steps,
counters, and a flow from each step to the first operation of it on each device. Times are
nanoseconds since the capture began.

Field numbers are those of google/perfetto, protos/perfetto/trace. All packets are one sequence,
whose first defines the names that the others refer to by number. Packets that differ in nothing but
their time are serialized once, and the time, whose field may stand anywhere, is put behind.
"""

import gzip
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fornax.config.errors import ProfileError
from fornax.config.files import write_whole
from fornax.profile.facts import Events, Operation
from fornax.profile.profile import Profile
from fornax.profile.schema import message_classes

__all__ = ["write_perfetto"]

_TRACE = message_classes(
    "fornax.perfetto",
    {
        "TracePacket": (
            "8 timestamp uint64, 10 trusted_packet_sequence_id uint32, 11 track_event TrackEvent, "
            "12 interned_data InternedData, 13 sequence_flags uint32, "
            "60 track_descriptor TrackDescriptor, 87 first_packet_on_sequence bool"
        ),
        "TrackDescriptor": (
            "1 uuid uint64, 2 name string, 3 process ProcessDescriptor, 4 thread ThreadDescriptor, "
            "5 parent_uuid uint64, 8 counter CounterDescriptor"
        ),
        "ProcessDescriptor": (
            "1 pid int32, 2 cmdline *string, 3 legacy_sort_index int32, 6 process_name string"
        ),
        "ThreadDescriptor": "1 pid int32, 2 tid int32, 5 thread_name string",
        "CounterDescriptor": "3 unit int32, 6 unit_name string",
        "TrackEvent": (
            "3 category_iids +uint64, 4 debug_annotations *DebugAnnotation, 9 type int32, "
            "10 name_iid uint64, 11 track_uuid uint64, 30 counter_value |int64, "
            "44 double_counter_value |double, 47 flow_ids +fixed64, "
            "48 terminating_flow_ids +fixed64"
        ),
        "DebugAnnotation": "1 name_iid uint64, 5 double_value |double, 17 string_value_iid |uint64",
        "InternedData": (
            "1 event_categories *Interned, 2 event_names *Interned, "
            "3 debug_annotation_names *Interned, 29 debug_annotation_string_values *Interned"
        ),
        "Interned": "1 iid uint64, 2 name string",
    },
)
_BEGIN, _END, _COUNTER = 1, 2, 4
_UNIT_BYTES = 3
_CLEARED, _NEEDED = 1, 2
"""Flags: the names that the sequence had are not valid any more; the packet needs them."""
_SEQUENCE = 1
_PACKET, _TIME = b"\x0a", b"\x40"
"""Tags of `Trace.packet` and `TracePacket.timestamp`."""

Place = tuple[int, str]
"""A rank, and a device of it or "" for its host."""


def write_perfetto(profile: Profile, path: Path | str) -> Path:
    """Write a capture as a trace; compressed where the name ends in `.gz`.

    Raises:
      ProfileError: the name ends in neither `.pftrace` nor `.pftrace.gz`, or it cannot be written.
    """
    path = Path(path)
    if not path.name.endswith((".pftrace", ".pftrace.gz")):
        raise ProfileError(
            f"{path} is not a name of a trace of Perfetto; end it in .pftrace.gz, or in .pftrace"
        )
    data = _Trace(profile).data()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, gzip.compress(data, 6, mtime=0) if path.suffix == ".gz" else data)
    except OSError as error:
        raise ProfileError(
            f"{path} cannot be written ({error.strerror or error}); name another file"
        ) from error
    return path


class _Trace:
    """One trace on its way from a profile to bytes."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._parts: list[bytes] = []
        self._interned: dict[str, dict[str, int]] = defaultdict(dict)
        self._tracks = 0
        first, last = _span(profile)
        self._first = min(first, 0)
        self._width = max(1, -(-(last - self._first).bit_length() // 7))
        self._processes: dict[Place, tuple[int, int]] = {}
        """The track and the number of each process."""

    def data(self) -> bytes:
        """The whole file."""
        self._describe_processes()
        flows = self._flows()
        self._steps(flows)
        for number in range(len(self._profile.rows)):
            self._row(number, flows)
        self._memory()
        self._counters()
        self._rates()
        interned = _TRACE["InternedData"]()
        for table, names in self._interned.items():
            for name, number in names.items():
                getattr(interned, table).add(iid=number, name=name)
        first = _TRACE["TracePacket"](
            trusted_packet_sequence_id=_SEQUENCE,
            first_packet_on_sequence=True,
            sequence_flags=_CLEARED,
            interned_data=interned,
        ).SerializeToString()
        return b"".join((_PACKET, _varint(len(first)), first, *self._parts))

    def _intern(self, table: str, text: str) -> int:
        names = self._interned[table]
        return names.setdefault(text, len(names) + 1)

    def _packet(self, **values: Any) -> bytes:
        return _TRACE["TracePacket"](
            trusted_packet_sequence_id=_SEQUENCE, sequence_flags=_NEEDED, **values
        ).SerializeToString()

    def _track(self, **values: Any) -> int:
        """Describe a track; its number."""
        self._tracks += 1
        packet = self._packet(track_descriptor={"uuid": self._tracks, **values})
        self._parts += (_PACKET, _varint(len(packet)), packet)
        return self._tracks

    def _event(self, track: int, kind: int, name: str = "", category: str = "", **values: Any):
        """A packet of an event up to its time."""
        given = values | {"track_uuid": track, "type": kind}
        if name:
            given["name_iid"] = self._intern("event_names", name)
            given["category_iids"] = [self._intern("event_categories", category)]
        packet = self._packet(track_event=given)
        return b"".join((_PACKET, _varint(len(packet) + 1 + self._width), packet, _TIME))

    def _at(self, packet: bytes, time: int) -> None:
        self._parts += (packet, _varint(time - self._first, self._width))

    def _annotations(self, values: Mapping[str, str | float | None]) -> list[dict[str, Any]]:
        found = []
        for name, value in values.items():
            if value:
                one: dict[str, Any] = {"name_iid": self._intern("debug_annotation_names", name)}
                if isinstance(value, str):
                    one["string_value_iid"] = self._intern("debug_annotation_string_values", value)
                else:
                    one["double_value"] = value
                found.append(one)
        return found

    def _describe_processes(self) -> None:
        """A rank's host comes first, then its devices."""
        info = self._profile.info
        for rank in info.ranks:
            devices = {row.device for row in self._profile.rows if row.rank == rank and row.device}
            devices |= {each.device for each in self._profile.samples if each.rank == rank}
            for device in ("", *sorted(devices)):
                host = info.hosts[rank] if rank < len(info.hosts) else ""
                number = len(self._processes) + 1
                process = {
                    "pid": number,
                    "cmdline": [info.folder, info.device_kind],
                    "legacy_sort_index": number,
                    "process_name": f"rank {rank}: {device or f'host {host}'.strip()}",
                }
                self._processes[rank, device] = self._track(process=process), number

    def _steps(self, flows: "_Flows") -> None:
        tracks = {
            rank: self._track(parent_uuid=self._processes[rank, ""][0], name="steps")
            for rank in self._profile.info.ranks
        }
        for at, step in enumerate(self._profile.steps):
            causes = {f"{cause} ms": 1e3 * s for cause, s in step.causes.seconds.items()}
            begin = self._event(
                tracks[step.rank],
                _BEGIN,
                f"{step.name} {step.number}",
                "step",
                debug_annotations=self._annotations(causes),
                flow_ids=flows.of_step[at],
            )
            self._at(begin, step.begin)
            self._at(self._event(tracks[step.rank], _END), step.end)

    def _row(self, number: int, flows: "_Flows") -> None:
        row = self._profile.rows[number]
        process, pid = self._processes[row.rank, row.device]
        tracks: list[int] = []
        ends: list[bytes] = []
        begins: dict[tuple[int, int, int], bytes] = {}
        names, operations = row.events.name.tolist(), row.events.operation.tolist()
        for lane, time, at in _nested(row.events):
            if lane == len(tracks):
                title = row.name if lane == 0 else f"{row.name} ({lane + 1})"
                thread = {"pid": pid, "tid": 1_000_000 + self._tracks, "thread_name": title}
                tracks.append(self._track(parent_uuid=process, thread=thread))
                ends.append(self._event(tracks[lane], _END))
            if at < 0:
                self._at(ends[lane], time)
                continue
            flow = flows.of_event.get((number, at))
            key = (lane, names[at], operations[at])
            begin = begins.get(key) if flow is None else None
            if begin is None:
                begin = self._event(
                    tracks[lane],
                    _BEGIN,
                    self._profile.names[names[at]],
                    row.kind,
                    debug_annotations=self._of_operation(operations[at]),
                    terminating_flow_ids=[] if flow is None else [flow],
                )
                if flow is None:
                    begins[key] = begin
            self._at(begin, time)

    def _of_operation(self, number: int) -> list[dict[str, Any]]:
        if number < 0:
            return []
        operation: Operation = self._profile.operations[number]
        bound = operation.bound_seconds
        return self._annotations(
            {
                "module": "/".join(operation.scope),
                "source": operation.source,
                "class": operation.category,
                "flops": float(operation.flops),
                "bytes": float(operation.bytes),
                "roofline us": None if bound is None else 1e6 * bound,
            }
        )

    def _flows(self) -> "_Flows":
        """From each step to the first operation of it on each device."""
        first: dict[tuple[int, str], tuple[int, int, int]] = {}
        for number, row in enumerate(self._profile.rows):
            if row.kind != "operations":
                continue
            steps, places = np.unique(row.events.step, return_index=True)
            for step, at in zip(steps.tolist(), places.tolist(), strict=True):
                begin = int(row.events.begin[at])
                key = (step, row.device)
                if step >= 0 and begin < first.get(key, (begin + 1,))[0]:
                    first[key] = (begin, number, at)
        found = _Flows()
        for identity, ((step, _), (_, number, at)) in enumerate(first.items(), 1):
            found.of_step[step].append(identity)
            found.of_event[number, at] = identity
        return found

    def _memory(self) -> None:
        """In use by the allocators."""
        tracks: dict[Place, int] = {}
        for sample in self._profile.samples:
            place = (sample.rank, sample.device)
            if place not in tracks:
                tracks[place] = self._track(
                    parent_uuid=self._processes[place][0],
                    name="memory in use",
                    counter={"unit": _UNIT_BYTES},
                )
            event = self._event(tracks[place], _COUNTER, counter_value=sample.bytes_in_use)
            self._at(event, sample.time)

    def _counters(self) -> None:
        """Of hardware."""
        for counter in self._profile.counters.series:
            place = (counter.rank, counter.device)
            process = self._processes.get(place, self._processes[counter.rank, ""])[0]
            track = self._track(parent_uuid=process, name=counter.name, counter={})
            for time, value in zip(counter.time.tolist(), counter.value.tolist(), strict=True):
                self._at(self._event(track, _COUNTER, double_counter_value=value), time)

    def _rates(self) -> None:
        """What each step reached of FLOPs and bytes per second."""
        profile = self._profile
        work = np.zeros((len(profile.steps) + 1, 2))
        each = np.array([(one.flops, one.bytes) for one in profile.operations]).reshape(-1, 2)
        for row in profile.rows:
            known = (row.events.operation >= 0) & (row.events.duration > 0)
            np.add.at(work, row.events.step[known], each[row.events.operation[known]])
        tracks: dict[tuple[int, str], int] = {}
        for step, values in zip(profile.steps, work.tolist(), strict=False):
            for name, value in zip(("GFLOP/s", "GB/s"), values, strict=True):
                if (step.rank, name) not in tracks:
                    tracks[step.rank, name] = self._track(
                        parent_uuid=self._processes[step.rank, ""][0],
                        name=name,
                        counter={"unit_name": name},
                    )
                track, rate = tracks[step.rank, name], value / max(step.end - step.begin, 1)
                for time, reached in ((step.begin, rate), (step.end, 0.0)):
                    event = self._event(track, _COUNTER, double_counter_value=reached)
                    self._at(event, time)


class _Flows:
    """Numbers of flows by where they begin and end."""

    def __init__(self) -> None:
        self.of_step: dict[int, list[int]] = defaultdict(list)
        """By the position of the step."""
        self.of_event: dict[tuple[int, int], int] = {}
        """By the number of the row, and the position in it."""


def _nested(events: Events) -> Iterator[tuple[int, int, int]]:
    """Beginnings and ends as they are nested: the lane, the time, and the event that begins, -1 for
    an end. Within one lane an event lies inside of another or beside it."""
    lanes: list[list[int]] = []
    pairs = zip(events.begin.tolist(), events.end.tolist(), strict=True)
    for at, (begin, end) in enumerate(pairs):
        for lane, ends in enumerate(lanes):
            while ends and ends[-1] <= begin:
                yield lane, ends.pop(), -1
            if not ends or end <= ends[-1]:
                break
        else:
            lane, ends = len(lanes), []
            lanes.append(ends)
        ends.append(end)
        yield lane, begin, at
    for lane, ends in enumerate(lanes):
        while ends:
            yield lane, ends.pop(), -1


def _span(profile: Profile) -> tuple[int, int]:
    """The first and the last time of a profile."""
    times = [each for step in profile.steps for each in (step.begin, step.end)]
    times += [sample.time for sample in profile.samples]
    for counter in profile.counters.series:
        times += counter.time.tolist()
    for row in profile.rows:
        if len(row.events):
            times += [int(row.events.begin.min()), int(row.events.end.max())]
    return min(times, default=0), max(times, default=0)


def _varint(value: int, width: int = 1) -> bytes:
    """A number in groups of seven bits, the lowest first, padded to `width` bytes."""
    found = bytearray()
    while value > 0x7F or len(found) + 1 < width:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)
