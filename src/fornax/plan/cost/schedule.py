"""From a compiled program's schedule to the seconds of its step, and what they are spent on.

The schedule is walked in program order with one queue of computation and one for each link.
Operations take their roofline time, collectives that of the network. A transfer that is started and
later waited for runs while the computation between them does; the wait costs what is left of it.
Transfers that share a link are queued. A loop's first turns are walked one by one, so that what
one leaves on the links delays the next; the rest repeat the last.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from fornax.hlo import (
    Calibration,
    Collective,
    Done,
    Item,
    Loop,
    Operation,
    Rates,
    Run,
    Start,
    calibration_of,
    operation_seconds,
)
from fornax.plan.artifact import DeviceFact
from fornax.plan.cost.groups import group_layouts, permute_layout
from fornax.plan.cost.network import GroupLayout, Transfer, collective_seconds, network_of
from fornax.plan.facts import ClassOfWork, CollectiveTime, Prediction
from fornax.plan.format import argument_path, short_operation
from fornax.plan.topology import Topology

GroupLayouts = Mapping[str, tuple[GroupLayout, ...]]
"""Name of a collective to how its groups are joined; several where groups differ."""

_LOOP_TURNS = 3
"""Turns of a loop that are walked: the first meets what came before it, the second what the first
left, the third stands for all others."""

_LINK_BOUNDS: Mapping[str, str] = {
    "chip": "ici",
    "ici": "ici",
    "nvlink": "ici",
    "dcn": "dcn",
    "network": "dcn",
    "host": "host",
}


@dataclass(frozen=True)
class ItemTime:
    """What one run of an operation or a collective takes."""

    seconds: float
    links: tuple[str, ...] = ()
    """Queues that a transfer occupies, if any."""
    bound: Literal["compute", "memory"] = "compute"
    """Of an operation."""
    link: str = ""
    """Of a collective: the kind of link that takes longest."""


Timing = Callable[[Operation | Collective], ItemTime]


def predict(
    schedule: Sequence[Item],
    devices: Sequence[DeviceFact],
    topology: Topology,
    calibration: Calibration | None = None,
) -> Prediction:
    """The time of one step of a compiled program.

    Args:
      schedule: `ProgramFacts.schedule`, or a part of it.
      devices: in the order of `mesh.devices.flat`.
      topology: the chips.
      calibration: what they reach; None takes the chip's own.
    """
    layouts = collective_layouts(schedule, devices, topology)
    return predict_schedule(schedule, layouts, topology, calibration)


def predict_schedule(
    schedule: Sequence[Item],
    layouts: GroupLayouts,
    topology: Topology,
    calibration: Calibration | None = None,
) -> Prediction:
    """As `predict`, from the schedule and how its collectives' groups are joined."""
    chosen = calibration or calibration_of(topology.chip)
    timing = _timing(topology, chosen, layouts)
    timeline = walk(schedule, timing)
    low, high = bounds(schedule, timing)
    work, memory_seconds = _work(schedule, timing, topology.chip.devices)
    collectives = _collectives(schedule, timing, timeline)
    return Prediction(
        step_seconds=timeline.seconds,
        compute_seconds=timeline.compute,
        memory_seconds=memory_seconds,
        exposed_seconds=timeline.exposed_seconds,
        optimistic_seconds=low,
        pessimistic_seconds=high,
        bound=_bound(schedule, timing, timeline),
        work=work,
        collectives=collectives,
        notes=_notes(schedule, layouts, chosen),
    )


def collective_layouts(
    schedule: Sequence[Item], devices: Sequence[DeviceFact], topology: Topology
) -> dict[str, tuple[GroupLayout, ...]]:
    """How the groups of each collective are joined.

    Args:
      schedule: `ProgramFacts.schedule`.
      devices: in the order of `mesh.devices.flat`.
      topology: the slice.
    """
    known: dict[tuple[bool, int], tuple[GroupLayout, ...]] = {}
    found: dict[str, tuple[GroupLayout, ...]] = {}
    for collective in _collectives_of(schedule):
        pairs = collective.kind in ("collective-permute", "send-recv")
        key = (pairs, hash(collective.groups))
        if key not in known:
            known[key] = (
                (permute_layout(collective.groups, devices, topology),)
                if pairs
                else group_layouts(collective.groups, devices, topology)
            )
        found[collective.name] = known[key]
    return found


def _timing(topology: Topology, calibration: Calibration, layouts: GroupLayouts) -> Timing:
    """Times each operation and collective once; of groups joined differently, the slowest."""
    rates = Rates(chip=topology.chip, calibration=calibration)
    network = network_of(topology.chip, calibration)
    alone = (GroupLayout(shared=float(topology.chip.devices)),)
    known: dict[int, ItemTime] = {}

    def time(what: Operation | Collective) -> ItemTime:
        if isinstance(what, Operation):
            timed = operation_seconds(what, rates)
            return ItemTime(timed.seconds, ("memory",), bound=timed.bound)
        transfers: Iterator[Transfer] = (
            collective_seconds(what.kind, what.bytes, layout, network)
            for layout in layouts.get(what.name) or alone
        )
        slowest = max(transfers, key=lambda transfer: transfer.seconds)
        return ItemTime(slowest.seconds, slowest.links, link=slowest.link)

    def timing(what: Operation | Collective) -> ItemTime:
        if id(what) not in known:
            known[id(what)] = time(what)
        return known[id(what)]

    return timing


def _turns(loop: Loop) -> int:
    return max(1, round(loop.count))


def _zeros() -> defaultdict[str, float]:
    return defaultdict(float)


@dataclass
class Timeline:
    """What a walk found; all times in seconds."""

    seconds: float = 0.0
    """From the first item to the end of the last transfer."""
    compute: float = 0.0
    """The core's own work."""
    exposed: defaultdict[str, float] = field(default_factory=_zeros)
    """Transfer to the time the core stood still for it."""
    transfer: defaultdict[str, float] = field(default_factory=_zeros)
    """Transfer to the time it took on its links."""
    free: dict[str, float] = field(default_factory=dict)
    """Link to when it is free again."""
    running: dict[str, float] = field(default_factory=dict)
    """Transfer to when it ends."""

    @property
    def exposed_seconds(self) -> float:
        """All standing still."""
        return sum(self.exposed.values())


def walk(schedule: Sequence[Item], timing: Timing) -> Timeline:
    """Walk a schedule from beginning to end; what nobody waits for ends with the program."""
    timeline = Timeline()
    _walk_items(schedule, timing, timeline, 1.0)
    for name in list(timeline.running):
        _wait(name, timeline, 1.0)
    return timeline


def _walk_items(schedule: Sequence[Item], timing: Timing, line: Timeline, weight: float) -> None:
    """Walk items; times are noted `weight` times."""
    for item in schedule:
        if isinstance(item, Loop):
            _repeat(item, timing, line, weight)
        elif isinstance(item, Done):
            _wait(item.what.name, line, weight)
        elif isinstance(item, Run) and isinstance(item.what, Operation):
            seconds = timing(item.what).seconds
            line.seconds += seconds
            line.compute += weight * seconds
        else:
            _start(item.what.name, timing(item.what), line, weight)
            if isinstance(item, Run):
                _wait(item.what.name, line, weight)


def _start(name: str, time: ItemTime, line: Timeline, weight: float) -> None:
    begin = max([line.seconds, *(line.free.get(link, 0.0) for link in time.links)])
    end = begin + time.seconds
    for link in time.links:
        line.free[link] = end
    line.transfer[name] += weight * time.seconds
    line.running[name] = end


def _wait(name: str, line: Timeline, weight: float) -> None:
    end = line.running.pop(name, None)
    if end is not None and end > line.seconds:
        line.exposed[name] += weight * (end - line.seconds)
        line.seconds = end


def _repeat(loop: Loop, timing: Timing, line: Timeline, weight: float) -> None:
    walked = min(_turns(loop), _LOOP_TURNS)
    for _ in range(walked - 1):
        _walk_items(loop.body, timing, line, weight)
    rest = _turns(loop) - walked
    now, free, running = line.seconds, {**line.free}, {**line.running}
    _walk_items(loop.body, timing, line, weight * (1 + rest))
    line.seconds += rest * (line.seconds - now)
    for times, old in ((line.free, free), (line.running, running)):
        for name, end in times.items():
            times[name] = end + rest * (end - old.get(name, end))


def bounds(schedule: Sequence[Item], timing: Timing) -> tuple[float, float]:
    """Seconds with every transfer hidden as far as the links allow, and with none hidden."""
    compute, transfer, busy = 0.0, 0.0, _zeros()
    for item, weight in _flat(schedule):
        if isinstance(item, Done):
            continue
        time = timing(item.what)
        if isinstance(item, Run) and isinstance(item.what, Operation):
            compute += weight * time.seconds
        else:
            transfer += weight * time.seconds
            for link in time.links:
                busy[link] += weight * time.seconds
    return max([compute, *busy.values()]), compute + transfer


def _flat(
    schedule: Sequence[Item], weight: float = 1.0
) -> Iterator[tuple[Run | Start | Done, float]]:
    """Every item that is not a loop, with the times it runs."""
    for item in schedule:
        if isinstance(item, Loop):
            yield from _flat(item.body, weight * _turns(item))
        else:
            yield item, weight


def _collectives_of(schedule: Sequence[Item]) -> Iterator[Collective]:
    """Every collective, once for each place it begins."""
    for item, _ in _flat(schedule):
        if not isinstance(item, Done) and isinstance(item.what, Collective):
            yield item.what


def _operations(schedule: Sequence[Item]) -> Iterator[tuple[Operation, float]]:
    """Operations of the core with the times they run."""
    for item, weight in _flat(schedule):
        if isinstance(item, Run) and isinstance(item.what, Operation):
            yield item.what, weight


def _work(
    schedule: Sequence[Item], timing: Timing, devices: int
) -> tuple[tuple[ClassOfWork, ...], float]:
    """A row for each category of operations of a chip, and the seconds that wait for memory."""
    sums: defaultdict[str, list[float]] = defaultdict(lambda: [0.0] * 4)
    for operation, weight in _operations(schedule):
        time = timing(operation)
        memory = time.seconds if time.bound == "memory" else 0.0
        values = (time.seconds, operation.flops, operation.bytes, memory)
        row = sums[operation.category]
        for index, value in enumerate(values):
            row[index] += weight * value
    rows = sorted(sums.items(), key=lambda item: -item[1][0])
    return tuple(
        ClassOfWork(
            name=name,
            flops=flops * devices,
            bytes=moved * devices,
            seconds=seconds,
            bound="memory" if memory > seconds / 2 else "compute",
        )
        for name, (seconds, flops, moved, memory) in rows
    ), sum(row[3] for _, row in rows)


def _collectives(
    schedule: Sequence[Item], timing: Timing, timeline: Timeline
) -> tuple[CollectiveTime, ...]:
    by_name = {collective.name: collective for collective in _collectives_of(schedule)}
    found = (
        CollectiveTime(
            kind=one.kind,
            axes=one.axes,
            link=timing(one).link,
            bytes=one.bytes,
            count=round(one.count),
            seconds=timeline.transfer.get(name, 0.0),
            exposed_seconds=timeline.exposed.get(name, 0.0),
            what=argument_path(one.argument) or short_operation(one.op_name) or name,
            source=one.source or one.fornax_source,
        )
        for name, one in by_name.items()
    )
    return tuple(sorted(found, key=lambda one: (-one.seconds, -one.exposed_seconds)))


def _bound(schedule: Sequence[Item], timing: Timing, timeline: Timeline) -> str:
    """What most of the step's seconds go to."""
    spent: defaultdict[str, float] = defaultdict(float)
    for operation, weight in _operations(schedule):
        time = timing(operation)
        spent[time.bound] += weight * time.seconds
    links = {one.name: timing(one).link for one in _collectives_of(schedule)}
    for name, seconds in timeline.exposed.items():
        spent[_LINK_BOUNDS[links[name]] if name in links else "memory"] += seconds
    return max(spent, key=lambda name: spent[name]) if spent else "compute"


def _notes(
    schedule: Sequence[Item], layouts: GroupLayouts, calibration: Calibration
) -> tuple[str, ...]:
    notes = [f"shares of published rates: {calibration.source}"]
    boxes = [name for name, found in layouts.items() if not all(layout.regular for layout in found)]
    if boxes:
        notes.append(
            f"{len(boxes)} collectives have groups that fill no box of the torus, timed as the box "
            f"around them: {', '.join(boxes[:3])}"
        )
    if not any(isinstance(item, Start) for item, _ in _flat(schedule)):
        notes.append("the schedule starts nothing early: every transfer is exposed")
    return tuple(notes)
