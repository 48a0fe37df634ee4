"""How the members of a collective's groups are joined, read from where the devices stand.

A group is a list of positions in the mesh's device list. Members that fill a box of the torus make
one physical axis for each dimension in which they differ: a ring when they go round a dimension
that wraps, a line otherwise; members s places apart share their links with s - 1 other groups.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal, Protocol

from fornax.plan.cost.network import PhysicalAxis, Span

__all__ = ["Place", "Torus", "permute_span", "span_of", "spans_of"]


class Place(Protocol):
    """Where one device stands (`fornax.plan.artifact.DeviceFact`)."""

    @property
    def coords(self) -> tuple[int, ...]:
        """The chip's place in its slice; for GPUs its number in the server."""
        ...

    @property
    def core(self) -> int:
        """Which of the chip's devices it is."""
        ...

    @property
    def slice(self) -> int:
        """The slice, or the GPU server."""
        ...


class Torus(Protocol):
    """What is needed of a `fornax.plan.topology.Topology`."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Chips along each dimension of a slice."""
        ...

    @property
    def wrap(self) -> tuple[bool, ...]:
        """Which dimensions wrap around."""
        ...

    @property
    def chip(self) -> "ChipShape":
        """The kind of chip."""
        ...


class ChipShape(Protocol):
    """What is needed of a `fornax.mesh.hardware.Chip`."""

    @property
    def torus(self) -> int:
        """Dimensions of the torus; 0 for a switch."""
        ...

    @property
    def devices(self) -> int:
        """Devices of a chip."""
        ...


def span_of(members: Sequence[Place], topology: Torus) -> Span:
    """How one group is joined."""
    slices = {member.slice for member in members}
    first = min(slices)
    inside = [member for member in members if member.slice == first]
    chips = sorted({tuple(member.coords) for member in inside})
    if not topology.chip.torus:
        return Span(switched=len(chips), slices=len(slices), switch=True)
    cores = max(1, round(len(inside) / len(chips)))
    shared = topology.chip.devices / cores
    axes = tuple(_axes(chips, topology, shared))
    box = math.prod(axis.size for axis in axes)
    regular = box == len(chips) and len(inside) * len(slices) == len(members)
    if not regular:
        axes = tuple(_thinned(axis, box / len(chips)) for axis in axes)
    return Span(cores=cores, axes=axes, slices=len(slices), regular=regular, shared=shared)


def _axes(
    chips: Sequence[tuple[int, ...]], topology: Torus, shared: float
) -> Iterable[PhysicalAxis]:
    for dimension, places in enumerate(zip(*chips, strict=True)):
        values = sorted(set(places))
        if len(values) > 1:
            extent, wraps = topology.shape[dimension], topology.wrap[dimension]
            yield _axis(dimension, values, extent, wraps, shared)


def _axis(
    dimension: int, values: Sequence[int], extent: int, wraps: bool, shared: float
) -> PhysicalAxis:
    """The axis of members at `values` of a dimension of `extent` chips."""
    gaps = [b - a for a, b in itertools.pairwise(values)]
    around = values[0] + extent - values[-1]
    if wraps and around < max(gaps):  # the longest gap lies inside: start after it
        cut = gaps.index(max(gaps)) + 1
        gaps = [*gaps[cut:], around, *gaps[: cut - 1]]
        around = max(b - a for a, b in itertools.pairwise(values))
    step = max(gaps)
    ring = wraps and around <= step and len(values) > 2
    share = shared * (sum(gaps) / len(gaps))
    return PhysicalAxis(dimension=dimension, size=len(values), ring=ring, share=share)


def _thinned(axis: PhysicalAxis, factor: float) -> PhysicalAxis:
    """The axis of a box that the members fill only to 1 / `factor`: others fill the rest."""
    return PhysicalAxis(
        dimension=axis.dimension, size=axis.size, ring=axis.ring, share=axis.share * factor
    )


def spans_of(
    groups: Sequence[Sequence[int]], devices: Sequence[Place], topology: Torus
) -> tuple[Span, ...]:
    """The different spans among the groups of one collective; groups of one are left out.

    Args:
      groups: positions in `devices`, group by group; none means one group of all.
      devices: in the order of `mesh.devices.flat`.
      topology: the slice.
    """
    if not len(groups):
        groups = [range(len(devices))]
    found: dict[Span, None] = {}
    for group in groups:
        if len(group) > 1:
            found[span_of([devices[int(index)] for index in group], topology)] = None
    return tuple(found)


def permute_span(pairs: Sequence[Sequence[int]], devices: Sequence[Place], topology: Torus) -> Span:
    """How the partners of a collective-permute are joined.

    Each message goes the short way, dimension by dimension. The span is a line as long as the
    longest way, shared by as many as the messages on the busiest link.

    Args:
      pairs: source and target, positions in `devices`.
      devices: in the order of `mesh.devices.flat`.
      topology: the slice.
    """
    load: Counter[tuple] = Counter()
    farthest: dict[int, int] = {}
    ways: dict[int, set[int]] = {}
    slices = 1
    for pair in pairs:
        source, target = (devices[int(index)] for index in pair)
        if source.slice != target.slice:
            slices = 2
            continue
        route = list(_route(source, target, topology))
        load.update(route)
        for dimension, count in Counter(step[2] for step in route).items():
            farthest[dimension] = max(farthest.get(dimension, 0), count)
        for _, _, dimension, way in route:
            ways.setdefault(dimension, set()).add(way)
    if not topology.chip.torus:
        return Span(switched=2 if load else 1, slices=slices, switch=True)
    share = float(max(load.values(), default=1))
    axes = (
        PhysicalAxis(
            dimension=dimension,
            size=count + 1,
            ring=False,
            share=share,
            way=_way(ways[dimension]),
        )
        for dimension, count in sorted(farthest.items())
    )
    shared = float(topology.chip.devices)
    return Span(cores=1 if load else 2, axes=tuple(axes), slices=slices, shared=shared)


def _way(used: set[int]) -> Literal[-1, 0, 1]:
    """The direction that all steps take, 0 for both."""
    if len(used) > 1:
        return 0
    return 1 if 1 in used else -1


def _route(source: Place, target: Place, topology: Torus) -> Iterable[tuple]:
    """The directed links of a message: (slice, chip, dimension, direction)."""
    if not topology.chip.torus:
        if tuple(source.coords) != tuple(target.coords):
            yield (source.slice, tuple(source.coords), 0, 1)
        return
    here = list(source.coords)
    for dimension, goal in enumerate(target.coords):
        extent = topology.shape[dimension] if dimension < len(topology.shape) else 1
        wraps = dimension < len(topology.wrap) and topology.wrap[dimension]
        distance = goal - here[dimension]
        if wraps and abs(distance) > extent / 2:
            distance -= int(math.copysign(extent, distance))
        direction = 1 if distance > 0 else -1
        for _ in range(abs(distance)):
            yield (source.slice, tuple(here), dimension, direction)
            here[dimension] = (here[dimension] + direction) % extent
