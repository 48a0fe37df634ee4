"""The few numbers that stand between data sheets and what programs reach, per kind of chip.

Each is a share of a published rate. Which measurement each was fitted on is said beside it;
`benchmarks/plan_published.py` shows what they predict for runs that they were not fitted on.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from fornax.mesh.hardware import Chip
from fornax.plan.cost.network import Network

__all__ = ["CALIBRATIONS", "Calibration", "calibration_of", "network_of"]


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What a program reaches of the hardware table's rates."""

    matmul: float = 0.80
    """Share of peak FLOP/s in large matrix products."""
    attention: float = 0.50
    """Share of peak FLOP/s in attention kernels, of the FLOPs they execute."""
    memory: float = 0.80
    """Share of the memory bandwidth in element-wise work, reductions and copies."""
    links: float = 0.90
    """Share of a link's rate inside a slice or server."""
    outside: float = 0.80
    """Share of the network's rate between slices or servers."""
    host: float = 0.80
    """Share of the rate to the host's memory."""
    hop_seconds: float = 1e-6
    """Least time of one step between neighbours (Scaling book: about a microsecond)."""
    cycles: float = 1.0
    """Cycles that the compiler estimates, over those that pass."""
    clock: float | None = None
    """Hz of the compiler's cycles, where it is not the hardware table's."""
    overhead: float = 1e-6
    """Least time of one operation."""
    source: str = "not fitted: general figures"
    """What the shares were fitted on."""


_DEFAULT = Calibration()

CALIBRATIONS: Mapping[str, Calibration] = {}
"""Chip name to its calibration."""


def calibration_of(chip: Chip) -> Calibration:
    """The calibration of a kind of chip; general figures, which say so, for one without."""
    return CALIBRATIONS.get(chip.name, _DEFAULT)


def network_of(chip: Chip, calibration: Calibration | None = None) -> Network:
    """The rates that programs reach on a chip's links."""
    known = calibration or calibration_of(chip)
    return Network(
        link=chip.link_bandwidth * known.links,
        outside=chip.network_bandwidth * known.outside,
        host=chip.host_bandwidth * known.host,
        hop_seconds=known.hop_seconds,
    )
