"""Where the devices of a mesh would stand, without a compiler: jax's own assignment on descriptions
of devices."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from fornax.config.errors import ShardingError
from fornax.mesh import MeshConfig, make_mesh
from fornax.plan.artifact import DeviceFact
from fornax.plan.cost.network import Span
from fornax.plan.cost.span import spans_of
from fornax.plan.topology import Topology

__all__ = ["axis_span", "place"]


@dataclass(frozen=True)
class _Described:
    """What jax's assignment reads of a device."""

    id: int
    platform: str
    device_kind: str
    coords: tuple[int, ...]
    core_on_chip: int
    slice_index: int
    process_index: int = 0
    num_cores: int = 1

    @property
    def client(self) -> "_Described":
        """Stands in for the device's backend, which assignment does not use."""
        return self


def place(topology: Topology, mesh: MeshConfig) -> tuple[DeviceFact, ...]:
    """Where each device of `mesh.devices.flat` would stand on a topology.

    Raises:
      ShardingError: when the mesh does not fit the topology.
    """
    described = _describe(topology)
    try:
        grid = make_mesh(mesh, cast("Sequence[Any]", described)).devices
    except (NotImplementedError, ValueError) as error:
        raise ShardingError(f"the mesh cannot be laid out on {topology.name}: {error}") from error
    return tuple(
        DeviceFact(coords=device.coords, core=device.core_on_chip, slice=device.slice_index)
        for device in cast("Sequence[_Described]", grid.flat)
    )


def _describe(topology: Topology) -> list[_Described]:
    chip = topology.chip
    if not chip.torus:
        servers, each = topology.shape if len(topology.shape) == 2 else (1, topology.shape[0])
        places = [((gpu,), 0, server) for server in range(servers) for gpu in range(each)]
    else:
        extents = topology.shape + (1,) * (3 - len(topology.shape))
        # jax counts along the first dimension fastest
        chips = [tuple(reversed(c)) for c in itertools.product(*map(range, reversed(extents)))]
        places = [
            (coords, core, number)
            for number in range(topology.slices)
            for coords in chips
            for core in range(chip.devices)
        ]
    return [
        _Described(
            id=index,
            platform=chip.platform,
            device_kind=chip.kinds[0],
            coords=coords,
            core_on_chip=core,
            slice_index=number,
        )
        for index, (coords, core, number) in enumerate(places)
    ]


def axis_span(
    devices: Sequence[DeviceFact],
    sizes: Mapping[str, int],
    axes: Sequence[str],
    topology: Topology,
) -> Span:
    """How a group over some axes of a mesh is joined, the worst where groups differ.

    Args:
      devices: as `place` gives them.
      sizes: every axis of the mesh to its size, in mesh order.
      axes: the axes that the group spans.
      topology: the chips.
    """
    names = list(sizes)
    grid = np.arange(len(devices)).reshape(tuple(sizes.values()))
    along = [names.index(axis) for axis in axes]
    rest = [index for index in range(len(names)) if index not in along]
    groups = grid.transpose([*rest, *along]).reshape(-1, int(np.prod([sizes[a] for a in axes])))
    spans = spans_of(groups.tolist(), devices, topology)
    if not spans:
        return Span(switch=not topology.chip.torus)
    return min(spans, key=lambda span: (sum(axis.links for axis in span.axes), -span.slices))
