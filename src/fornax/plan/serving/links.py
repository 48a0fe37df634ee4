"""How long an engine's devices take to exchange arrays, by the network model of `plan.cost`."""

import itertools
from collections.abc import Callable, Sequence

from fornax.plan.artifact import DeviceFact
from fornax.plan.cost import Network, collective_seconds, spans_of
from fornax.plan.topology import Topology

__all__ = ["exchange_seconds", "first_devices"]


def exchange_seconds(
    topology: Topology, network: Network, places: Sequence[DeviceFact]
) -> Callable[[str, float], float]:
    """(kind, bytes of the whole array) to seconds of a collective over all of `places`."""
    spans = spans_of([range(len(places))], places, topology)

    def seconds(kind: str, size: float) -> float:
        times = [collective_seconds(kind, size, span, network).seconds for span in spans]
        return max(times, default=0.0)

    return seconds


def first_devices(topology: Topology, count: int) -> list[DeviceFact]:
    """Where an engine's devices stand: the first `count`, along the first dimension first."""
    chip = topology.chip
    if chip.torus:
        chips = [
            (tuple(reversed(coords)), 0)
            for coords in itertools.product(*(range(size) for size in reversed(topology.shape)))
        ]
    else:
        nodes, gpus = topology.shape if len(topology.shape) == 2 else (1, topology.shape[0])
        chips = [((gpu,), node) for node in range(nodes) for gpu in range(gpus)]
    found = [
        DeviceFact(coords=coords, core=core, slice=slice_)
        for coords, slice_ in chips
        for core in range(chip.devices)
    ]
    return found[:count]
