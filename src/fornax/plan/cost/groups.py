"""How the members of a collective's groups are joined, read from where the devices stand.

A group is a list of positions in the mesh's device list. Members that fill a box of the torus make
one physical axis for each dimension in which they differ: a ring when they go round a dimension
that wraps, a line otherwise; members s places apart share their links with s - 1 other groups.
Without a compiler devices stand where jax would assign them.
"""

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

import numpy as np

from fornax.config.errors import ShardingError
from fornax.mesh import MeshConfig, make_mesh
from fornax.plan.artifact import DeviceFact
from fornax.plan.cost.network import GroupLayout, PhysicalAxis
from fornax.plan.topology import Topology

if TYPE_CHECKING:
    import jax


def group_layout(members: Sequence[DeviceFact], topology: Topology) -> GroupLayout:
    """How one group is joined."""
    slices = {member.slice for member in members}
    first = min(slices)
    inside = [member for member in members if member.slice == first]
    chips = sorted({tuple(member.coords) for member in inside})
    if not topology.chip.torus:
        return GroupLayout(switched=len(chips), slices=len(slices), switch=True)
    cores = max(1, round(len(inside) / len(chips)))
    shared = topology.chip.devices / cores
    axes = tuple(_axes(chips, topology, shared))
    box = math.prod(axis.size for axis in axes)
    regular = box == len(chips) and len(inside) * len(slices) == len(members)
    if not regular:  # members of other groups fill the rest of the box
        factor = box / len(chips)
        axes = tuple(dataclasses.replace(axis, share=axis.share * factor) for axis in axes)
    return GroupLayout(cores=cores, axes=axes, slices=len(slices), regular=regular, shared=shared)


def _axes(
    chips: Sequence[tuple[int, ...]], topology: Topology, shared: float
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


def group_layouts(
    groups: Sequence[Sequence[int]], devices: Sequence[DeviceFact], topology: Topology
) -> tuple[GroupLayout, ...]:
    """The different layouts among the groups of one collective; groups of one are left out.

    Args:
      groups: positions in `devices`, group by group; none means one group of all.
      devices: in the order of `mesh.devices.flat`.
      topology: the slice.
    """
    if not len(groups):
        groups = [range(len(devices))]
    found: dict[GroupLayout, None] = {}
    for group in groups:
        if len(group) > 1:
            found[group_layout([devices[int(index)] for index in group], topology)] = None
    return tuple(found)


def permute_layout(
    pairs: Sequence[Sequence[int]], devices: Sequence[DeviceFact], topology: Topology
) -> GroupLayout:
    """How the partners of a collective-permute are joined.

    Each message goes the short way, dimension by dimension. The layout is a line as long as the
    longest way, shared by as many as the messages on the busiest link.

    Args:
      pairs: source and target, positions in `devices`.
      devices: in the order of `mesh.devices.flat`.
      topology: the slice.
    """
    load: Counter[_DirectedLink] = Counter()
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
        return GroupLayout(switched=2 if load else 1, slices=slices, switch=True)
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
    return GroupLayout(cores=1 if load else 2, axes=tuple(axes), slices=slices, shared=shared)


def _way(used: set[int]) -> Literal[-1, 0, 1]:
    """The direction that all steps take, 0 for both."""
    if len(used) > 1:
        return 0
    return 1 if 1 in used else -1


_DirectedLink = tuple[int, tuple[int, ...], int, int]
"""(slice, chip, dimension, direction)."""


def _route(source: DeviceFact, target: DeviceFact, topology: Topology) -> Iterator[_DirectedLink]:
    if not topology.chip.torus:
        if source.coords != target.coords:
            yield (source.slice, source.coords, 0, 1)
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


@dataclass(frozen=True)
class _DescribedDevice:
    """What jax's assignment of devices to a mesh reads of a device."""

    id: int
    platform: str
    device_kind: str
    coords: tuple[int, ...]
    core_on_chip: int
    slice_index: int
    process_index: int = 0
    num_cores: int = 1

    @property
    def client(self) -> "_DescribedDevice":
        """Stands in for the device's backend, which assignment does not use."""
        return self


def place(topology: Topology, mesh: MeshConfig) -> tuple[DeviceFact, ...]:
    """Where each device of `mesh.devices.flat` would be on a topology.

    Raises:
      ShardingError: when the mesh does not fit the topology.
    """
    chip = topology.chip
    described = [
        _DescribedDevice(
            id=index,
            platform=chip.platform,
            device_kind=chip.kinds[0],
            coords=device.coords,
            core_on_chip=device.core,
            slice_index=device.slice,
        )
        for index, device in enumerate(all_devices(topology))
    ]
    try:
        grid = make_mesh(mesh, cast("Sequence[jax.Device]", described)).devices
    except (NotImplementedError, ValueError) as error:
        raise ShardingError(f"the mesh cannot be laid out on {topology.name}: {error}") from error
    return tuple(
        DeviceFact(coords=device.coords, core=device.core_on_chip, slice=device.slice_index)
        for device in cast("Sequence[_DescribedDevice]", grid.flat)
    )


def all_devices(topology: Topology) -> list[DeviceFact]:
    """Every device in jax's order: along a torus's first dimension first, slice by slice."""
    chip = topology.chip
    if not chip.torus:
        servers, each = topology.shape if len(topology.shape) == 2 else (1, topology.shape[0])
        chips = [((gpu,), server) for server in range(servers) for gpu in range(each)]
    else:
        extents = topology.shape + (1,) * (3 - len(topology.shape))
        box = [tuple(reversed(c)) for c in itertools.product(*map(range, reversed(extents)))]
        chips = [(coords, number) for number in range(topology.slices) for coords in box]
    return [
        DeviceFact(coords=coords, core=core, slice=number)
        for coords, number in chips
        for core in range(chip.devices)
    ]


def axis_layout(
    devices: Sequence[DeviceFact],
    sizes: Mapping[str, int],
    axes: Sequence[str],
    topology: Topology,
) -> GroupLayout:
    """How a group over some axes of a mesh is joined, the worst where groups differ.

    Args:
      devices: as `place` gives them.
      sizes: every axis of the mesh to its size, in mesh order.
      axes: the axes that the group layouts.
      topology: the chips.
    """
    names = list(sizes)
    grid = np.arange(len(devices)).reshape(tuple(sizes.values()))
    along = [names.index(axis) for axis in axes]
    rest = [index for index in range(len(names)) if index not in along]
    groups = grid.transpose([*rest, *along]).reshape(-1, int(np.prod([sizes[a] for a in axes])))
    layouts = group_layouts(groups.tolist(), devices, topology)
    if not layouts:
        return GroupLayout(switch=not topology.chip.torus)
    return min(
        layouts, key=lambda layout: (sum(axis.links for axis in layout.axes), -layout.slices)
    )
