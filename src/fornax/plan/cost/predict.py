"""From a compiled program to the seconds of its step, and what they are spent on."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from fornax.plan.artifact import Artifact
from fornax.plan.cost import queues
from fornax.plan.cost.calibration import Calibration, calibration_of, network_of
from fornax.plan.cost.roofline import Rates
from fornax.plan.cost.schedule import Prices, Spans, collective_spans, collectives_of, timed_items
from fornax.plan.hlo.facts import Collective, Item, Loop, Operation, ProgramFacts, Run, Start
from fornax.plan.topology import Topology

__all__ = ["CategoryTime", "CollectiveTime", "Prediction", "predict", "predict_schedule"]

Bound = Literal["compute", "memory", "ici", "dcn", "host"]


@dataclass(frozen=True, kw_only=True)
class CategoryTime:
    """All operations of one category in a step, of one device."""

    seconds: float
    flops: float
    bytes: float
    memory_bound_seconds: float
    """The part spent in operations that wait for memory."""


@dataclass(frozen=True, kw_only=True)
class CollectiveTime:
    """One collective of the program, all its runs in a step."""

    collective: Collective
    link: str
    """The kind of link that takes longest: chip, ici, dcn, nvlink, network, host."""
    seconds: float
    """On its links."""
    exposed_seconds: float
    """That the core stands still for it."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A step's time; everything here is predicted."""

    step_seconds: float
    compute_seconds: float
    exposed_communication_seconds: float
    by_category: Mapping[str, CategoryTime]
    by_collective: tuple[CollectiveTime, ...]
    """The most exposed first."""
    bound: Bound
    optimistic_seconds: float
    """With every exchange hidden as far as links allow."""
    pessimistic_seconds: float
    """With none hidden."""
    calibration: Calibration
    notes: tuple[str, ...]


def predict(
    artifact: Artifact,
    facts: ProgramFacts,
    topology: Topology,
    calibration: Calibration | None = None,
) -> Prediction:
    """The time of one step of a compiled program.

    Args:
      artifact: says where the devices of the mesh are.
      facts: what `fornax.plan.hlo.analyse` read from it.
      topology: the chips.
      calibration: what they reach; None takes the chip's own.
    """
    spans = collective_spans(facts.schedule, artifact.devices, topology)
    return predict_schedule(facts.schedule, spans, topology, calibration)


def predict_schedule(
    schedule: Sequence[Item],
    spans: Spans,
    topology: Topology,
    calibration: Calibration | None = None,
) -> Prediction:
    """As `predict`, from the schedule and how its collectives' groups are joined."""
    chosen = calibration or calibration_of(topology.chip)
    prices = Prices(
        rates=Rates(chip=topology.chip, calibration=chosen),
        network=network_of(topology.chip, chosen),
        spans=spans,
    )
    items = timed_items(schedule, prices)
    walk = queues.walk(items)
    low, high = queues.bounds(items)
    categories = _categories(schedule, prices)
    collectives = _collectives(schedule, prices, walk)
    return Prediction(
        step_seconds=walk.seconds,
        compute_seconds=walk.compute,
        exposed_communication_seconds=walk.exposed_seconds,
        by_category=categories,
        by_collective=collectives,
        bound=_bound(categories, collectives, walk),
        optimistic_seconds=low,
        pessimistic_seconds=high,
        calibration=chosen,
        notes=_notes(schedule, spans, chosen),
    )


def _operations(schedule: Sequence[Item], weight: float = 1.0) -> list[tuple[Operation, float]]:
    """Operations of the core with the times they run."""
    found: list[tuple[Operation, float]] = []
    for item in schedule:
        if isinstance(item, Loop):
            found += _operations(item.body, weight * max(1, round(item.count)))
        elif isinstance(item, Run) and isinstance(item.what, Operation):
            found.append((item.what, weight))
    return found


def _categories(schedule: Sequence[Item], prices: Prices) -> dict[str, CategoryTime]:
    sums: defaultdict[str, list[float]] = defaultdict(lambda: [0.0] * 4)
    for operation, weight in _operations(schedule):
        timed = prices.operation(operation)
        memory = timed.seconds if timed.bound == "memory" else 0.0
        values = (timed.seconds, operation.flops, operation.bytes, memory)
        sums[operation.category] = [
            total + weight * value
            for total, value in zip(sums[operation.category], values, strict=True)
        ]
    return {
        name: CategoryTime(seconds=seconds, flops=flops, bytes=moved, memory_bound_seconds=memory)
        for name, (seconds, flops, moved, memory) in sorted(
            sums.items(), key=lambda item: -item[1][0]
        )
    }


def _collectives(
    schedule: Sequence[Item], prices: Prices, walk: queues.Walk
) -> tuple[CollectiveTime, ...]:
    by_name = {collective.name: collective for collective in collectives_of(schedule)}
    found = [
        CollectiveTime(
            collective=collective,
            link=prices.collective(collective).link,
            seconds=walk.transfer.get(name, 0.0),
            exposed_seconds=walk.exposed.get(name, 0.0),
        )
        for name, collective in by_name.items()
    ]
    return tuple(sorted(found, key=lambda one: (-one.exposed_seconds, -one.seconds)))


_LINKS: Mapping[str, Bound] = {
    "chip": "ici",
    "ici": "ici",
    "nvlink": "ici",
    "dcn": "dcn",
    "network": "dcn",
    "host": "host",
}


def _bound(
    categories: Mapping[str, CategoryTime],
    collectives: Sequence[CollectiveTime],
    walk: queues.Walk,
) -> Bound:
    """What most of the step's seconds go to."""
    spent: defaultdict[Bound, float] = defaultdict(float)
    for category in categories.values():
        spent["memory"] += category.memory_bound_seconds
        spent["compute"] += category.seconds - category.memory_bound_seconds
    for one in collectives:
        spent[_LINKS[one.link]] += one.exposed_seconds
    communicating = {one.collective.name for one in collectives}
    spent["memory"] += sum(
        seconds for name, seconds in walk.exposed.items() if name not in communicating
    )
    return max(spent, key=lambda name: spent[name]) if spent else "compute"


def _notes(schedule: Sequence[Item], spans: Spans, calibration: Calibration) -> tuple[str, ...]:
    notes = [f"shares of published rates: {calibration.source}"]
    boxes = [name for name, found in spans.items() if not all(span.regular for span in found)]
    if boxes:
        notes.append(
            f"{len(boxes)} collectives have groups that fill no box of the torus, timed as the box "
            f"around them: {', '.join(boxes[:3])}"
        )
    starts = [item for item in _flat(schedule) if isinstance(item, Start)]
    if not starts:
        notes.append("the schedule starts nothing early: every transfer is exposed")
    return tuple(notes)


def _flat(schedule: Sequence[Item]) -> list[Item]:
    found: list[Item] = []
    for item in schedule:
        found += _flat(item.body) if isinstance(item, Loop) else [item]
    return found
