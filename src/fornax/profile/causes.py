"""Steps, and the wall time of each by cause, to the nanosecond.

Steps are, in this order: the `Steps` line of a TPU; annotations on the host
(`jax.profiler.StepTraceAnnotation`), if at least half of the devices' time lies in them, so that a
host that runs ahead of its devices does not stand for them; runs of the program that took the most
time, one after the other.

In a step, time in which a device computes is `compute`; else, in which it exchanges, `exchange`.
What is left goes by the thread that makes the steps: compiling, an annotation `input/…`, waiting
for a device or a thread (`idle`), any other (`host`). Of several devices of a rank the mean counts.
"""

import dataclasses
import itertools
import re
from collections.abc import Mapping, Sequence

import numpy as np

from fornax.profile.facts import CAUSES, Cause, Causes, Ints, Operation, Step
from fornax.profile.intervals import Intervals
from fornax.profile.operations import CONTAINERS
from fornax.profile.raw import Execution, Key, Mark, Raw, RawRow

INPUT = "input/"
_COMPILING = re.compile(
    r"^(backend_compile|lower_sharding_computation|trace_to_jaxpr|compile_or_get_cached"
    r"|XlaCompile|compile_and_load)|::Compile\b"
)
WAITING = re.compile(r"\b(await|wait|block_until_ready|BlockHostUntilReady|rendezvous)\b", re.I)
_COPY_IN = re.compile(r"memcpyh2d|infeed", re.I)
_COPY = re.compile(r"memcpy|memset|outfeed", re.I)
_DISPATCH = re.compile(r"PjitFunction|::Execute\b|ExecuteReplicated")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Device:
    """When a device computed, and when it exchanged and did not compute."""

    compute: Intervals
    exchange: Intervals
    copy_in: Intervals


def find_steps(raw: Raw, operations: Mapping[tuple[int, Key], Operation]) -> list[Step]:
    """The steps of one rank with their causes, in the order of time.

    Args:
        raw: the rank's rows.
        operations: (rank, key of an event) -> its operation.
    """
    devices = _devices(raw, operations)
    working = Intervals.all_of(
        d for each in devices.values() for d in (each.compute, each.exchange)
    )
    marks = _marks(raw, working)
    thread = _step_thread(raw, marks)
    host = _host_causes(raw, thread, marks)
    return [
        Step(
            rank=raw.rank,
            number=mark.number,
            name=mark.name,
            begin=mark.begin,
            end=mark.end,
            causes=_causes(mark.begin, mark.end, list(devices.values()), host),
        )
        for mark in marks
    ]


def step_thread(raw: Raw) -> str:
    """The host's row that makes the steps; empty where none does."""
    return _step_thread(raw, _outermost(raw.marks))


def _devices(raw: Raw, operations: Mapping[tuple[int, Key], Operation]) -> dict[str, _Device]:
    held: dict[str, list[RawRow]] = {}
    for row in raw.rows:
        if row.device:
            held.setdefault(row.device, []).append(row)
    found = {}
    for device, rows in held.items():
        parts: dict[str, list[Intervals]] = {
            "compute": [],
            "exchange": [],
            "container": [],
            "in": [],
        }
        for row in rows:
            kinds = np.array(
                [_class(row, at, operations, raw.rank) for at in range(len(row.begin))]
            )
            for kind, sets in parts.items():
                chosen = kinds == kind
                begin = row.begin[chosen]
                sets.append(Intervals.union(begin, begin + row.duration[chosen]))
        sets = {kind: Intervals.all_of(each) for kind, each in parts.items()}
        busy = Intervals.all_of(
            [sets["container"], *(Intervals.union(*span) for span in raw.busy.get(device, []))]
        )
        exchange = sets["exchange"].without(sets["compute"])
        rest = busy.without(sets["compute"]).without(exchange)
        compute = Intervals.all_of([sets["compute"], rest])
        found[device] = _Device(compute=compute, exchange=exchange, copy_in=sets["in"])
    return found


def _class(row: RawRow, at: int, operations: Mapping[tuple[int, Key], Operation], rank: int) -> str:
    key = row.keys[at]
    operation = operations.get((rank, key)) if key else None
    if operation is None:
        if _COPY_IN.search(row.names[at]):
            return "in"
        exchanging = row.kind == "exchange" or _COPY.search(row.names[at])
        return "exchange" if exchanging else "compute"
    if operation.opcode in CONTAINERS or (not operation.opcode and _container(operation.name)):
        return "container"
    exchanging = operation.category == "exchange" or row.kind == "exchange"
    return "exchange" if exchanging else "compute"


def _container(name: str) -> bool:
    return name.partition(".")[0] in CONTAINERS


def _marks(raw: Raw, working: Intervals) -> list[Mark]:
    if raw.device_marks:
        return _joined(raw.device_marks)
    annotated = _outermost(raw.marks)
    marks = _extended(annotated, working)
    if marks:
        inside = sum(working.covered(mark.begin, mark.end) for mark in annotated)
        if 2 * inside >= working.covered(marks[0].begin, max(raw.end, marks[-1].end)):
            return marks
    runs = _runs(raw.executions)
    if not runs:
        return marks
    begins = [run.begin for run in runs]
    ends = [*begins[1:], runs[-1].end]
    numbers = [m.number for m in marks] if len(marks) == len(runs) else range(len(runs))
    return [
        Mark(
            rank=raw.rank,
            thread=marks[0].thread if marks else "",
            name=marks[0].name if marks else run.program,
            number=number,
            begin=begin,
            end=max(begin, end),
        )
        for run, number, begin, end in zip(runs, numbers, begins, ends, strict=True)
    ]


def _outermost(marks: Sequence[Mark]) -> list[Mark]:
    """Marks in the order of time, without those inside others."""
    found: list[Mark] = []
    for mark in sorted(marks, key=lambda mark: (mark.begin, -mark.end)):
        if not found or mark.begin >= found[-1].end:
            found.append(mark)
    return found


def _extended(marks: Sequence[Mark], working: Intervals) -> list[Mark]:
    """Let each step last until its devices are done with what they began in it."""
    found = []
    for mark, after in itertools.zip_longest(marks, marks[1:]):
        limit = after.begin if after else None
        last = int(np.searchsorted(working.begin, limit if limit else mark.end, side="left")) - 1
        end = mark.end
        if last >= 0 and working.begin[last] >= mark.begin:
            end = max(end, int(working.end[last]))
        found.append(dataclasses.replace(mark, end=min(end, limit) if limit else end))
    return found


def _joined(marks: Sequence[Mark]) -> list[Mark]:
    """One step of a rank from its devices' steps of that number."""
    by_number: dict[int, list[Mark]] = {}
    for mark in marks:
        by_number.setdefault(mark.number, []).append(mark)
    joined = [
        dataclasses.replace(same[0], begin=min(m.begin for m in same), end=max(m.end for m in same))
        for same in by_number.values()
    ]
    ordered = sorted(joined, key=lambda mark: mark.begin)
    return [
        dataclasses.replace(mark, end=min(mark.end, after.begin) if after else mark.end)
        for mark, after in itertools.zip_longest(ordered, ordered[1:])
    ]


def _runs(executions: Sequence[Execution]) -> list[Execution]:
    """Runs of the program that devices spent the most time in, in the order of time; of one that
    ran more than once, if any did."""
    runs: dict[tuple[str, int], Execution] = {}
    for each in executions:
        key = (each.program, each.run)
        known = runs.get(key, each)
        runs[key] = dataclasses.replace(
            known, begin=min(known.begin, each.begin), end=max(known.end, each.end)
        )
    programs: dict[str, list[Execution]] = {}
    for each in sorted(runs.values(), key=lambda each: each.begin):
        programs.setdefault(each.program, []).append(each)
    return max(
        programs.values(),
        key=lambda held: (len(held) > 1, sum(each.end - each.begin for each in held)),
        default=[],
    )


def _step_thread(raw: Raw, marks: Sequence[Mark]) -> str:
    named = next((mark.thread for mark in marks if mark.thread), "")
    if named:
        return named
    dispatching: dict[str, int] = {}
    for row in raw.rows:
        if row.kind == "host":
            spans = [
                int(d) for n, d in zip(row.names, row.duration, strict=True) if _DISPATCH.search(n)
            ]
            dispatching[row.name] = dispatching.get(row.name, 0) + sum(spans)
    return max(dispatching, key=lambda name: dispatching[name]) if any(dispatching.values()) else ""


def _host_causes(raw: Raw, thread: str, marks: Sequence[Mark]) -> dict[Cause, Intervals]:
    """When the thread that makes the steps compiled, waited for input, or waited."""
    rows = [r for r in raw.rows if not r.device and r.kind == "host" and r.name == thread]
    found: dict[Cause, Intervals] = {
        "compile": _named(rows, lambda name: bool(_COMPILING.search(name))),
        "input": _named(rows, lambda name: name.startswith(INPUT)),
        "idle": _named(rows, lambda name: bool(WAITING.search(name))),
    }
    if not rows:
        first = min((m.begin for m in marks), default=0)
        last = max((m.end for m in marks), default=0)
        found["idle"] = Intervals.union(np.array([first]), np.array([last]))
    return found


def _named(rows: Sequence[RawRow], chosen) -> Intervals:
    return Intervals.all_of(
        Intervals.union(row.begin[held], (row.begin + row.duration)[held])
        for row in rows
        for held in [np.fromiter((chosen(name) for name in row.names), bool, len(row.names))]
    )


def _causes(
    begin: int, end: int, devices: Sequence[_Device], host: Mapping[Cause, Intervals]
) -> Causes:
    whole = end - begin
    nothing = Intervals(np.zeros(0, np.int64), np.zeros(0, np.int64))
    each_device = devices or [_Device(compute=nothing, exchange=nothing, copy_in=nothing)]
    totals: dict[Cause, int] = dict.fromkeys(CAUSES, 0)
    for device in each_device:
        compute = device.compute.within(begin, end)
        exchange = device.exchange.within(begin, end)
        spent: dict[Cause, int] = {"compute": compute.length, "exchange": exchange.length}
        taken = Intervals.all_of([compute, exchange])
        waits: tuple[tuple[Cause, Sequence[Intervals]], ...] = (
            ("compile", [host["compile"]]),
            ("input", [device.copy_in, host["input"]]),
            ("idle", [host["idle"]]),
        )
        for cause, parts in waits:
            held = Intervals.all_of(part.within(begin, end) for part in parts)
            spent[cause] = held.without(taken).length
            taken = Intervals.all_of([taken, held])
        spent["host"] = whole - sum(spent.values())
        for cause, value in spent.items():
            totals[cause] += value
    return Causes(nanoseconds=_mean(totals, len(each_device)))


def _mean(totals: Mapping[Cause, int], count: int) -> dict[Cause, int]:
    """Divide so that the parts keep their sum: what rounding leaves goes to the largest rests."""
    parts = {cause: value // count for cause, value in totals.items()}
    left = sum(totals.values()) // count - sum(parts.values())
    order = sorted(totals, key=lambda cause: totals[cause] % count, reverse=True)
    for cause in order[:left]:
        parts[cause] += 1
    return parts


def step_of(steps: Sequence[Step], begin: Ints) -> np.ndarray:
    """Position among one rank's `steps` of the step in which each time lies; -1 outside."""
    begins = np.array([step.begin for step in steps], np.int64)
    ends = np.array([step.end for step in steps], np.int64)
    at = np.searchsorted(begins, begin, side="right") - 1
    inside = (
        (at >= 0) & (begin < ends[np.maximum(at, 0)]) if len(steps) else np.zeros(len(begin), bool)
    )
    return np.where(inside, at, -1).astype(np.int32)
