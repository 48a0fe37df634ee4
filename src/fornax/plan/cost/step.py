"""Seconds of a step whose operations are known but not their order.

An operation takes the longer of its arithmetic and its memory traffic, at the shares of the chip's
peaks in `fornax.hlo.roofline`. Exchanges run beside the computation as long as that lasts,
except those whose result the next operation waits for, of which half is hidden.
"""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fornax.config import from_mapping
from fornax.hlo import Timed, calibration_of
from fornax.mesh import MESH_AXES, MeshConfig
from fornax.plan.artifact import DeviceFact
from fornax.plan.cost.groups import axis_layout, place
from fornax.plan.cost.network import GroupLayout, Network, collective_seconds, network_of
from fornax.plan.facts import (
    ClassOfWork,
    CollectiveTime,
    Exchange,
    Prediction,
    StepFacts,
    Work,
)
from fornax.plan.topology import Topology, parse_topology

_UNITS = {"v6e": 256, "tpu7x": 256, "tpu": 128, "gpu": 64, "cpu": 16}
"""Side of the matrix unit by chip, else by platform; a product's sides are filled up to it."""

HIDDEN_OF_BLOCKING = 0.5
"""Share of an exchange that is hidden although the next operation waits for it: an assumption."""


def predict_step(facts: StepFacts, topology: Topology) -> Prediction:
    """The time of a step of which closed forms know the work and the exchanges."""
    work = _work(facts, topology)
    compute = sum(row.seconds for row in work)
    update = sum(row.seconds for row in work if row.name == "optimizer")
    collectives = _collectives(facts, topology, compute - update)
    exposed = sum(row.exposed_seconds for row in collectives)
    communication = sum(row.seconds for row in collectives)
    by_link: dict[str, float] = {}
    for row in collectives:
        by_link[row.link] = by_link.get(row.link, 0.0) + row.seconds
    return Prediction(
        step_seconds=compute + exposed,
        compute_seconds=compute,
        memory_seconds=sum(row.seconds for row in work if row.bound == "memory"),
        exposed_seconds=exposed,
        optimistic_seconds=max(compute, max(by_link.values(), default=0.0)),
        pessimistic_seconds=compute + communication,
        bound=_bound(work, collectives),
        work=work,
        collectives=collectives,
        notes=(_assumptions(topology), *facts.notes),
    )


def _bound(work: Sequence[ClassOfWork], collectives: Sequence[CollectiveTime]) -> str:
    """What takes the most of the step's time."""
    waits: dict[str, float] = {"compute": 0.0, "memory": 0.0}
    for row in work:
        waits[row.bound] += row.seconds
    for row in collectives:
        waits[row.link] = waits.get(row.link, 0.0) + row.exposed_seconds
    return max(waits, key=lambda name: waits[name])


def _assumptions(topology: Topology) -> str:
    rates = calibration_of(topology.chip)
    return (
        f"predicted without compiling: matrix products at {rates.matmul_estimated:.0%} of the "
        f"peak, attention at {rates.attention:.0%}, memory at {rates.memory:.0%} of its "
        f"bandwidth; exchanges overlap with computation, {HIDDEN_OF_BLOCKING:.0%} of those whose "
        "result the next operation waits for"
    )


@dataclass(frozen=True, kw_only=True)
class DeviceRates:
    """What programs reach on one device."""

    matmul: float
    """FLOP/s of products, in their dtype."""
    attention: float
    """FLOP/s of attention kernels."""
    memory: float
    """Bytes/s of its memory."""
    overhead: float = 0.0
    """Least seconds of an operation."""
    unit: int = 1
    """Side of its matrix unit."""


def time_work(work: Work, rates: DeviceRates) -> Timed:
    """Time of one run."""
    peak = rates.attention if work.kind == "attention" else rates.matmul
    executed = work.flops * work.computed
    return Timed(executed / (peak * _filled(work, rates.unit)), work.bytes / rates.memory)


def _filled(work: Work, unit: int) -> float:
    """Share of the matrix units that a product's contracted and output sides fill."""
    share = 1.0
    for side in work.sides[1:] if work.sides else ():
        share *= side / (-(-side // unit) * unit)
    return share


def _work(facts: StepFacts, topology: Topology) -> tuple[ClassOfWork, ...]:
    """A row for each class, of a chip: its devices work side by side."""
    chip = topology.chip
    shares = calibration_of(chip)

    @functools.cache
    def rates(dtype: str) -> DeviceRates:
        peak = chip.peak(dtype) / chip.devices
        return DeviceRates(
            matmul=peak * shares.matmul_estimated,
            attention=peak * shares.attention,
            memory=chip.memory_bandwidth / chip.devices * shares.memory,
            unit=_UNITS.get(chip.name, _UNITS[chip.platform]),
        )

    classes: dict[str, _Class] = {}
    for one in facts.work:
        time = time_work(one, rates(one.dtype or facts.dtype))
        classes.setdefault(one.kind, _Class()).add(one, time)
    return tuple(
        ClassOfWork(
            name=name,
            flops=row.flops * chip.devices,
            bytes=int(row.bytes) * chip.devices,
            seconds=row.seconds,
            bound="compute" if row.compute >= row.memory else "memory",
        )
        for name, row in classes.items()
    )


@dataclass
class _Class:
    """Sums over the work of one class on one device."""

    flops: float = 0.0
    bytes: float = 0.0
    seconds: float = 0.0
    compute: float = 0.0
    memory: float = 0.0

    def add(self, work: Work, time: Timed) -> None:
        """All of a step's runs of one operation."""
        self.flops += work.flops * work.count
        self.bytes += work.bytes * work.count
        self.seconds += time.seconds * work.count
        self.compute += time.compute * work.count
        self.memory += time.memory * work.count


def _collectives(
    facts: StepFacts, topology: Topology, layers_seconds: float
) -> tuple[CollectiveTime, ...]:
    """Seconds of each exchange, and how many of them the layers' computation does not hide.

    Links of different kinds run side by side; each hides behind the same computation.
    """
    timed = list(_timed(facts, topology))
    free = layers_seconds
    free -= sum(seconds * HIDDEN_OF_BLOCKING for one, seconds, _ in timed if one.blocking)
    by_link: dict[str, float] = {}
    for one, seconds, link in timed:
        if not one.blocking:
            by_link[link] = by_link.get(link, 0.0) + seconds
    over = {link: max(0.0, total - max(free, 0.0)) / total for link, total in by_link.items()}
    worst = max(over, key=lambda link: over[link] * by_link[link], default=None)

    def exposed(one: Exchange, link: str) -> float:
        if one.blocking:
            return 1 - HIDDEN_OF_BLOCKING
        return over[link] if link == worst else 0.0

    return tuple(
        CollectiveTime(
            kind=one.kind,
            axes=one.axes,
            link=link,
            bytes=one.bytes,
            count=one.count,
            seconds=seconds,
            exposed_seconds=seconds * exposed(one, link),
            what=one.name,
        )
        for one, seconds, link in timed
    )


def _timed(facts: StepFacts, topology: Topology) -> Iterable[tuple[Exchange, float, str]]:
    """Each exchange, the seconds of all its runs, and its kind of link."""
    network: Network = network_of(topology.chip)
    sizes = tuple(facts.mesh.values())
    for one in facts.exchanges:
        # The devices of a chip share its link to the host.
        alone = GroupLayout(shared=topology.chip.devices)
        layout = _axis_layout(topology.name, sizes, one.axes) if one.axes else alone
        took = collective_seconds(one.kind, one.bytes, layout, network)
        link = {"dcn": "dcn", "network": "dcn", "host": "host"}.get(took.link, "ici")
        yield one, one.count * took.seconds, link


@functools.lru_cache(maxsize=64)
def _devices(topology: str, sizes: tuple[int, ...]) -> tuple[DeviceFact, ...]:
    mesh = from_mapping(MeshConfig, dict(zip(MESH_AXES, sizes, strict=True)))
    return place(parse_topology(topology), mesh)


@functools.lru_cache(maxsize=8192)
def _axis_layout(topology: str, sizes: tuple[int, ...], axes: tuple[str, ...]) -> GroupLayout:
    named = dict(zip(MESH_AXES, sizes, strict=True))
    return axis_layout(_devices(topology, sizes), named, axes, parse_topology(topology))
