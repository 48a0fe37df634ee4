"""What the planes of CPU threads, GPU streams and TPU cores mean, as one kind of row.

Sources: the names of planes, lines and statistics in openxla/xla's `xplane_schema.cc`; for CPU what
jax 0.10 and 0.12 write.

- CPU: threads of the plane `/host:CPU`. Thunks carry `hlo_op`, `program_id`, `run_id` and
  `device_ordinal`; each has a twin `end: …`. `ThunkExecutor::Execute` spans what a thread runs.
- GPU: `/device:GPU:n`, a line for each stream; kernels carry `hlo_op` and `program_id`.
- TPU: `/device:TPU:n` with the lines `XLA Ops`, `Async XLA Ops`, `XLA Modules`, `Steps`.
"""

import dataclasses
import re
from collections.abc import Iterable, Sequence

import numpy as np

from fornax.profile.facts import Ints, Kind
from fornax.profile.raw import Annotation, Execution, Key, Mark, Raw, RawRow
from fornax.profile.schema import XSpace
from fornax.profile.xspace import Line, Plane

_DEVICE = re.compile(r"/device:(TPU|GPU):(\d+)$")
_TWIN, _POOL_EVENT = "end: ", "ThreadpoolListener::"
_NOISE = re.compile(f"^({_TWIN}|{_POOL_EVENT})")
_EXECUTOR = "ThunkExecutor::Execute"
_PYTHON = "$"
_POOL = re.compile(r"^tf_|/-?\d+$")
"""What thread pools add to their names: a prefix, and the thread's number."""
_MODULE = re.compile(r"(.+)\((\d+)\)$")
_TPU_KINDS: dict[str, Kind] = {"XLA Ops": "operations", "Async XLA Ops": "exchange"}
_SERVING = re.compile(r"request/|engine/(forward|decode)$|batch/")
"""Annotations of servers that say what they serve; `serving.py` reads them."""
_COUNTERS = ("_counters_", "counters_")
"""Beginnings of the names of lines whose events are samples of hardware counters."""
_DERIVED = ("Steps", "XLA Modules", "Framework Ops", "Framework Name Scope", "Source code")
"""Lines that repeat what others hold."""


def adapt(space: XSpace, rank: int) -> Raw:
    """Read the planes of one rank's capture."""
    start, stop = _session(space)
    raw = Raw(rank=rank, begin=start, end=stop)
    for message in space.planes:
        plane = Plane(message, start)
        device = _DEVICE.match(plane.name)
        if plane.name == "/host:metadata":
            _metadata(raw, plane)
        elif plane.name == "/host:CPU":
            _host(raw, plane)
        elif device and device.group(1) == "TPU":
            _tpu(raw, plane, f"tpu:{device.group(2)}")
        elif device:
            _gpu(raw, plane, f"gpu:{device.group(2)}")
    begins = [int(row.begin[0]) for row in raw.rows]
    ends = [int((row.begin + row.duration).max()) for row in raw.rows]
    raw.whole = bool(start)
    raw.begin = raw.begin or min(begins, default=0)
    raw.end = raw.end or max(ends, default=raw.begin)
    return raw


def _session(space: XSpace) -> tuple[int, int]:
    """When the session began and ended, as its own plane says; 0 where it does not."""
    for message in space.planes:
        if message.name == "Task Environment":
            stats = Plane(message, 0).stats
            names = ("profile_start_time", "profile_stop_time")
            begin, end = (int(stats.get(name, 0)) for name in names)
            return begin, end
    return 0, 0


def _metadata(raw: Raw, plane: Plane) -> None:
    stats = plane.stats
    for name in ("jax", "jaxlib"):
        if f"{name}_version" in stats:
            raw.versions[name] = str(stats[f"{name}_version"])
    for number, metadata in plane.metadata.items():
        values = plane.values(metadata)
        proto = next((value for value in values.values() if isinstance(value, bytes)), None)
        if proto:
            named = _MODULE.match(metadata.name)
            program = int(values.get("program_id", named.group(2) if named else number))
            raw.programs[program] = (named.group(1) if named else metadata.name, proto)


def _host(raw: Raw, plane: Plane) -> None:
    seen: dict[str, int] = {}
    lines = list(plane.lines())
    helped = _helped(plane, lines)
    for at, line in enumerate(lines):
        pool = _POOL.sub("", line.name) or "thread"
        seen[pool] = seen.get(pool, 0) + 1
        thread = pool if seen[pool] == 1 else f"{pool} #{seen[pool]}"
        _thread(raw, plane, line, thread, helped[at])


def _helped(plane: Plane, lines: Sequence[Line]) -> list[Ints]:
    """What other threads worked on parts of each event, line by line.

    A thread that hands parts of an operation to its pool records each part under a number; the
    thread that takes one runs it between a `StartRegion` with that number and a `StopRegion`.
    """
    owners: dict[int, tuple[int, int]] = {}
    regions: list[tuple[int, int, int]] = []
    for at, line in enumerate(lines):
        labels = {number: plane.label(number) for number in np.unique(line.metadata).tolist()}
        names = [labels[number] for number in line.metadata.tolist()]
        begins, ends = line.begin.tolist(), (line.begin + line.duration).tolist()
        held, opened = -1, (0, -1)
        for position, name in enumerate(names):
            if not name.startswith(_POOL_EVENT):
                if name == _EXECUTOR and opened[1] >= 0:  # who ends the last part continues from it
                    regions.append((opened[0], opened[1], int(begins[position])))
                    opened = (0, -1)
                if ends[position] > begins[position] and not name.startswith(_TWIN):
                    held = position  # the innermost that began last
                continue
            stats = plane.values(line.events[position])
            if name == f"{_POOL_EVENT}Record":
                if held >= 0 and begins[position] < ends[held] and "_p" in stats:
                    owners[int(stats["_p"])] = (at, held)
            elif name == f"{_POOL_EVENT}StartRegion":
                opened = (begins[position], int(stats.get("_c", -1)))
            elif opened[1] >= 0:
                regions.append((opened[0], opened[1], int(begins[position])))
                opened = (0, -1)
    helped = [np.zeros(len(line.begin), np.int64) for line in lines]
    for begin, part, end in regions:
        at, owner = owners.get(part, (-1, -1))
        if at >= 0 and begin < int(lines[at].begin[owner] + lines[at].duration[owner]):
            helped[at][owner] += end - begin
    return helped


def _thread(raw: Raw, plane: Plane, line: Line, thread: str, helped: Ints) -> None:
    """Part the events of a thread: thunks by device, Python calls, and all other work."""
    labels = {number: plane.label(number) for number in np.unique(line.metadata).tolist()}
    groups: dict[tuple[str, Kind], list[int]] = {}
    keys: dict[int, Key] = {}
    runs: dict[tuple[str, int, str], list[int]] = {}
    executors: list[int] = []
    for at, number in enumerate(line.metadata.tolist()):
        label = labels[number]
        if _NOISE.match(label):
            continue
        stats = plane.values(line.events[at]) if line.events[at].stats else {}
        if "hlo_op" in stats:
            device = f"cpu:{stats.get('device_ordinal', 0)}"
            keys[at] = _key(stats)
            groups.setdefault((device, "operations"), []).append(at)
            runs.setdefault((device, int(stats.get("run_id", 0)), keys[at][1]), []).append(at)
            continue
        kind: Kind = "python" if label.startswith(_PYTHON) else "host"
        groups.setdefault(("", kind), []).append(at)
        if label == _EXECUTOR:
            executors.append(at)
        if stats and _SERVING.match(label):
            begin = int(line.begin[at])
            end = begin + int(line.duration[at])
            raw.annotations.append(Annotation(name=label, begin=begin, end=end, facts=stats))
        if "step_num" in stats:
            begin = int(line.begin[at])
            raw.marks.append(
                Mark(
                    rank=raw.rank,
                    thread=thread,
                    name=label,
                    number=int(stats["step_num"]),
                    begin=begin,
                    end=begin + int(line.duration[at]),
                )
            )
    for (device, kind), members in groups.items():
        row = _row(raw.rank, device, thread, kind, line, members, labels, keys)
        raw.rows.append(dataclasses.replace(row, helped=helped[members]) if device else row)
    for (device, run, program), members in runs.items():
        _add_execution(raw, device, program, run, line, members)
    _assign_executors(raw, line, executors, {d: m for (d, k), m in groups.items() if d})


def _assign_executors(
    raw: Raw, line: Line, executors: list[int], thunks: dict[str, list[int]]
) -> None:
    """Give each span of an executor to the device whose thunk begins first inside it."""
    spans = sorted(executors, key=lambda at: (line.begin[at], -line.duration[at]))
    for device, members in thunks.items():
        starts = line.begin[members]
        inside = []
        for at in spans:
            first = int(np.searchsorted(starts, line.begin[at]))
            if first < len(starts) and starts[first] < line.begin[at] + line.duration[at]:
                inside.append(at)
        begin = line.begin[inside]
        raw.busy.setdefault(device, []).append((begin, begin + line.duration[inside]))


def _gpu(raw: Raw, plane: Plane, device: str) -> None:
    """A stream per row; what a stream runs most says whether it is a row of exchanges."""
    for line in plane.lines():
        if line.name.startswith(_DERIVED) or line.name in _TPU_KINDS:
            continue
        if line.name.startswith(_COUNTERS):
            _count(raw, plane, line, device)
            continue
        labels = {number: plane.label(number) for number in np.unique(line.metadata).tolist()}
        keys, runs = {}, {}
        for at, event in enumerate(line.events):
            stats = plane.values(event)
            if "hlo_op" in stats:
                keys[at] = _key(stats)
                run = int(stats.get("run_id", stats.get("group_id", 0)))
                runs.setdefault((run, keys[at][1]), []).append(at)
        members = list(range(len(line.events)))
        nccl = sum("nccl" in labels[number].lower() for number in line.metadata.tolist())
        kind: Kind = "exchange" if 2 * nccl > len(members) else "operations"
        raw.rows.append(_row(raw.rank, device, line.name, kind, line, members, labels, keys))
        for (run, program), held in runs.items():
            _add_execution(raw, device, program, run, line, held)
    _note_kind(raw, plane)


def _tpu(raw: Raw, plane: Plane, device: str) -> None:
    """Operations carry what they are in their metadata; modules say when each program ran."""
    modules: list[tuple[int, int, str, int]] = []
    for line in plane.lines():
        labels = {number: plane.label(number) for number in np.unique(line.metadata).tolist()}
        ends = (line.begin + line.duration).tolist()
        if line.name == "XLA Modules":
            for at, begin in enumerate(line.begin.tolist()):
                stats = plane.values(line.events[at])
                text = labels[int(line.metadata[at])]
                named = _MODULE.match(text)
                program = named.group(1) if named else text
                modules.append((begin, ends[at], program, int(stats.get("run_id", at))))
            raw.busy.setdefault(device, []).append((line.begin, line.begin + line.duration))
        elif line.name == "Steps":
            for at, begin in enumerate(line.begin.tolist()):
                label = labels[int(line.metadata[at])]
                number = int(label) if label.isdigit() else at
                raw.device_marks.append(
                    Mark(
                        rank=raw.rank,
                        thread="",
                        name="step",
                        number=number,
                        begin=begin,
                        end=ends[at],
                    )
                )
        elif line.name.startswith(_COUNTERS):
            _count(raw, plane, line, device)
        elif line.name in _TPU_KINDS:
            keys = _metadata_keys(plane, line, labels)
            members = list(range(len(line.events)))
            kind = _TPU_KINDS[line.name]
            raw.rows.append(_row(raw.rank, device, line.name, kind, line, members, labels, keys))
    for begin, end, program, run in modules:
        raw.executions.append(
            Execution(rank=raw.rank, device=device, program=program, run=run, begin=begin, end=end)
        )
    _note_kind(raw, plane)


def _count(raw: Raw, plane: Plane, line: Line, device: str) -> None:
    """Take samples of counters: an event is one, its numbers are the values."""
    for at, event in enumerate(line.events):
        values = plane.values(event)
        told = {key: value for key, value in values.items() if isinstance(value, int | float)}
        name = plane.label(int(line.metadata[at]))
        for key, value in told.items():
            of = (device, name if len(told) == 1 else f"{name}: {key}")
            times, samples = raw.counters.setdefault(of, ([], []))
            times.append(int(line.begin[at]))
            samples.append(float(value))


def _metadata_keys(plane: Plane, line: Line, labels: dict[int, str]) -> dict[int, Key]:
    known: dict[int, Key] = {}
    for number, label in labels.items():
        stats = plane.values(plane.metadata[number]) if number in plane.metadata else {}
        program = int(stats.get("program_id", 0))
        known[number] = (program, str(stats.get("hlo_module", "")), label)
    return {at: known[number] for at, number in enumerate(line.metadata.tolist())}


def _note_kind(raw: Raw, plane: Plane) -> None:
    kind = plane.stats.get("device_type_string") or plane.stats.get("device_type")
    if kind:
        raw.kinds.append(str(kind))


def _key(stats: dict) -> Key:
    return int(stats.get("program_id", 0)), str(stats.get("hlo_module", "")), str(stats["hlo_op"])


def _add_execution(
    raw: Raw, device: str, program: str, run: int, line: Line, members: list[int]
) -> None:
    begin = line.begin[members]
    raw.executions.append(
        Execution(
            rank=raw.rank,
            device=device,
            program=program,
            run=run,
            begin=int(begin.min()),
            end=int((begin + line.duration[members]).max()),
        )
    )


def _row(
    rank: int,
    device: str,
    name: str,
    kind: Kind,
    line: Line,
    members: Iterable[int],
    labels: dict[int, str],
    keys: dict[int, Key],
) -> RawRow:
    chosen = list(members)
    return RawRow(
        rank=rank,
        device=device,
        name=name,
        kind=kind,
        begin=line.begin[chosen],
        duration=line.duration[chosen],
        names=tuple(labels[number] for number in line.metadata[chosen].tolist()),
        keys=tuple(keys.get(at) for at in chosen),
    )
