"""Seconds of one operation on one device: the longest of arithmetic, memory and the compiler's own
count of cycles.

Between data sheets and what programs reach stand a few shares of published rates, per kind of chip.
Which measurement each was fitted on is said beside it; `benchmarks/plan_published.py` shows what
they predict for runs that they were not fitted on.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from fornax.hlo.facts import Operation
from fornax.mesh.hardware import Chip

__all__ = [
    "CALIBRATIONS",
    "Calibration",
    "Rates",
    "Timed",
    "calibration_of",
    "operation_seconds",
]


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What a program reaches of the hardware table's rates."""

    matmul: float = 0.90
    """Share of peak FLOP/s in matrix products of a compiled program."""
    matmul_estimated: float = 0.80
    """The same for closed forms (`fornax.plan.closed_form`), which see less of the work around the
    products: what they leave out counts here."""
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
    cycles: float = 0.5
    """Share of the compiler's estimated cycles that is the least time of a matrix product. All of
    them would make Llama 3.1 8B on v6e-8 74 % slower than published, the roofline alone 17 %."""
    clock: float | None = None
    """Hz of the compiler's cycles, where it is not the hardware table's."""
    overhead: float = 1e-6
    """Least time of one operation."""
    source: str = "not fitted: general figures"
    """What the shares were fitted on."""


_DEFAULT = Calibration()

_PEAK_CYCLE = 2 * 4 * 256 * 256
"""FLOPs of a v6e or TPU7x core in a cycle: products of large compiled programs count up to 0.82 of
it by the compiler's own cycles, and v6e's peak then means the 1.75 GHz that v5p's means."""

CALIBRATIONS: Mapping[str, Calibration] = {
    "v5e": Calibration(
        matmul_estimated=0.84, source="matmul_estimated: MaxText's 16B on one v5e-256"
    ),
    "v5p": Calibration(
        matmul_estimated=0.84, source="matmul_estimated: MaxText's 32B on v5p-128 (64 chips)"
    ),
    "v6e": Calibration(
        matmul_estimated=0.62,
        host=1.0,
        clock=918e12 / _PEAK_CYCLE,
        source="matmul_estimated and host: MaxText's Llama 3.1 8B on v6e-8",
    ),
    "tpu7x": Calibration(
        matmul=0.69,
        matmul_estimated=0.70,
        clock=2307e12 / 2 / _PEAK_CYCLE,
        source="matmul and matmul_estimated: MaxText's Llama 3.1 70B on TPU7x 4x4x4",
    ),
}
"""Chip name to its calibration."""


def calibration_of(chip: Chip) -> Calibration:
    """The calibration of a chip: what was measured of it, else of its kind; general figures, which
    say so, for one without."""
    known = CALIBRATIONS.get(chip.name, _DEFAULT)
    if not chip.shares:
        return known
    return dataclasses.replace(known, **chip.shares, source=chip.sources["shares"])


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What one device reaches."""

    chip: Chip
    calibration: Calibration

    @property
    def memory(self) -> float:
        """Bytes per second."""
        return self.chip.memory_bandwidth / self.chip.devices * self.calibration.memory

    @property
    def clock(self) -> float | None:
        """Cycles per second, as the compiler counts them; None where they are not known."""
        return self.calibration.clock or self.chip.clock

    def peak(self, operation: Operation) -> float:
        """FLOP/s of products in the operation's dtype, all of it."""
        return self.chip.peak(operation.dtype) / self.chip.devices

    def share(self, operation: Operation) -> float:
        """What the operation reaches of that."""
        kernel = operation.category in ("attention", "kernel")
        return self.calibration.attention if kernel else self.calibration.matmul


@dataclass(frozen=True)
class Timed:
    """Seconds of one run: arithmetic and memory traffic overlap, and the longer decides.

    The roofline of Williams et al. 2009.
    """

    compute: float
    memory: float
    least: float = 0.0
    """Of any operation."""

    @property
    def seconds(self) -> float:
        """All of it."""
        return max(self.compute, self.memory, self.least)

    @property
    def bound(self) -> Literal["compute", "memory"]:
        """What it waits for."""
        return "compute" if self.compute >= self.memory else "memory"


def operation_seconds(operation: Operation, rates: Rates) -> Timed:
    """Time of one run.

    For products a share of the cycles that the compiler estimates is the least time: it knows
    padded tiles and operands that do not stream. It is no more than a floor because whole programs
    run faster than their estimated cycles add up to.
    """
    memory = operation.bytes / rates.memory
    compute = operation.flops / (rates.peak(operation) * rates.share(operation))
    if operation.cycles is not None and rates.clock and operation.category == "matmul":
        compute = max(compute, rates.calibration.cycles * operation.cycles / rates.clock)
    return Timed(compute, memory, rates.calibration.overhead)
