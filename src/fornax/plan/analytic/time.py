"""Seconds of a step from its pieces and exchanges.

A piece takes the longer of its arithmetic and its memory traffic, at the shares of the chip's peaks
in `fornax.plan.cost.calibration`. Exchanges run beside the computation as long as that lasts,
except those whose result the next operation waits for, of which half is hidden.
"""

import functools
from collections.abc import Iterable, Sequence

from fornax.config import from_mapping
from fornax.mesh import MESH_AXES, MeshConfig
from fornax.plan.analytic.flops import Piece
from fornax.plan.analytic.local import Local
from fornax.plan.analytic.result import CollectiveEstimate, OperationEstimate
from fornax.plan.analytic.traffic import Exchange
from fornax.plan.artifact import DeviceFact
from fornax.plan.cost import axis_span, calibration_of, collective_seconds, network_of, place
from fornax.plan.cost.network import Span
from fornax.plan.topology import parse_topology

__all__ = ["HIDDEN_WAITS", "class_seconds", "exchange_seconds"]


_UNITS = {"v6e": 256, "tpu7x": 256, "tpu": 128, "gpu": 64, "cpu": 16}
"""Side of the matrix unit by chip, else by platform; a product's sides are filled up to it."""

HIDDEN_WAITS = 0.5
"""Share of an exchange that is hidden although the next operation waits for it: an assumption."""


def class_seconds(local: Local, pieces: Iterable[Piece]) -> tuple[OperationEstimate, ...]:
    """Pieces by class, each class with the sum of its pieces' times, of one device."""
    chip = local.topology.chip
    rates = calibration_of(chip)
    unit = _UNITS.get(chip.name, _UNITS[chip.platform])
    peak = chip.peak(local.config.dtypes.compute) / chip.devices
    bandwidth = chip.memory_bandwidth / chip.devices * rates.memory
    classes: dict[str, list[float]] = {}
    for piece in pieces:
        share = rates.attention if piece.kind == "attention" else rates.matmul_estimated
        work = piece.flops / (peak * share * _filled(piece, unit))
        moved = piece.bytes / bandwidth
        row = classes.setdefault(piece.kind, [0.0] * 5)
        for index, value in enumerate((piece.flops, piece.bytes, max(work, moved), work, moved)):
            row[index] += value * piece.count
    return tuple(
        OperationEstimate(
            name=name,
            flops=flops,
            bytes=int(moved),
            seconds=seconds,
            bound="compute" if work >= traffic else "memory",
        )
        for name, (flops, moved, seconds, work, traffic) in classes.items()
    )


def _filled(piece: Piece, unit: int) -> float:
    """Share of the matrix units that a product's contracted and output sides fill."""
    if piece.sides is None:
        return 1.0
    share = 1.0
    for side in piece.sides[1:]:
        share *= side / (-(-side // unit) * unit)
    return share


def exchange_seconds(
    local: Local, found: Sequence[Exchange], layers_seconds: float
) -> tuple[CollectiveEstimate, ...]:
    """Seconds of each exchange, and how many of them the layers' computation does not hide.

    Args:
      local: the step.
      found: its exchanges.
      layers_seconds: how long the computation lasts that exchanges can run beside.
    """
    chip = local.topology.chip
    network = network_of(chip)
    timed: list[tuple[Exchange, float, str]] = []
    for exchange in found:
        if exchange.kind == "host-transfer":
            # The devices of a chip share its link to the host.
            seconds = exchange.bytes * chip.devices / network.host
            timed.append((exchange, exchange.count * seconds, "host"))
            continue
        span = _span(local, exchange.axes)
        took = collective_seconds(exchange.kind, exchange.bytes, span, network)
        link = "dcn" if took.link in ("dcn", "network") else "ici"
        timed.append((exchange, exchange.count * took.seconds, link))
    free = layers_seconds
    waiting = [item for item in timed if item[0].waits]
    beside = [item for item in timed if not item[0].waits]
    free -= sum(seconds * HIDDEN_WAITS for _, seconds, _ in waiting)
    by_link: dict[str, float] = {}
    for _, seconds, link in beside:
        by_link[link] = by_link.get(link, 0.0) + seconds
    # Links of different kinds run side by side; each hides behind the same computation.
    over = {link: max(0.0, total - max(free, 0.0)) / total for link, total in by_link.items()}
    worst = max(over, key=lambda link: over[link] * by_link[link], default=None)
    return tuple(
        CollectiveEstimate(
            name=exchange.name,
            kind=exchange.kind,  # pyrefly: ignore[bad-argument-type]
            axes=exchange.axes,
            group_size=exchange.group,
            bytes=exchange.bytes,
            count=exchange.count,
            dtype=exchange.dtype,
            link=link,  # pyrefly: ignore[bad-argument-type]
            seconds=seconds,
            exposed_seconds=(
                seconds * (1 - HIDDEN_WAITS)
                if exchange.waits
                else seconds * (over[link] if link == worst else 0.0)
            ),
        )
        for exchange, seconds, link in timed
    )


def _span(local: Local, axes: tuple[str, ...]) -> Span:
    """How the devices along some axes are joined."""
    return _span_of(local.topology.name, tuple(local.mesh.values()), axes)


@functools.lru_cache(maxsize=64)
def _devices(topology: str, sizes: tuple[int, ...]) -> tuple[DeviceFact, ...]:
    mesh = from_mapping(MeshConfig, dict(zip(MESH_AXES, sizes, strict=True)))
    return place(parse_topology(topology), mesh)


@functools.lru_cache(maxsize=8192)
def _span_of(topology: str, sizes: tuple[int, ...], axes: tuple[str, ...]) -> Span:
    named = dict(zip(MESH_AXES, sizes, strict=True))
    return axis_span(_devices(topology, sizes), named, axes, parse_topology(topology))
