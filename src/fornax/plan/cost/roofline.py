"""Seconds of one operation on one device: the longest of arithmetic, memory and the compiler's own
count of cycles."""

from dataclasses import dataclass
from typing import Literal

from fornax.mesh.hardware import Chip
from fornax.plan.cost.calibration import Calibration
from fornax.plan.hlo.facts import Operation

__all__ = ["Rates", "Timed", "operation_seconds"]


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What one device reaches."""

    chip: Chip
    calibration: Calibration

    @property
    def memory(self) -> float:
        """Bytes a second."""
        return self.chip.memory_bandwidth / self.chip.devices * self.calibration.memory

    @property
    def clock(self) -> float | None:
        """Cycles a second, as the compiler counts them; None where they are not known."""
        return self.calibration.clock or self.chip.clock

    def peak(self, operation: Operation) -> float:
        """FLOP/s of products in the operation's dtype, all of it."""
        return self.chip.peak(operation.dtype) / self.chip.devices

    def share(self, operation: Operation) -> float:
        """What the operation reaches of that."""
        kernel = operation.category in ("attention", "kernel")
        return self.calibration.attention if kernel else self.calibration.matmul


@dataclass(frozen=True, kw_only=True)
class Timed:
    """The time of one run of an operation, and what it waits for."""

    seconds: float
    bound: Literal["compute", "memory"]


def operation_seconds(operation: Operation, rates: Rates) -> Timed:
    """Time of one run.

    A roofline (Williams et al. 2009): arithmetic and memory traffic overlap, the longer decides.
    For products a share of the cycles that the compiler estimates is the least time: it knows
    padded tiles and operands that do not stream. It is no more than a floor because whole programs
    run faster than their estimated cycles add up to.
    """
    memory = operation.bytes / rates.memory
    compute = operation.flops / (rates.peak(operation) * rates.share(operation))
    if operation.cycles is not None and rates.clock and operation.category == "matmul":
        compute = max(compute, rates.calibration.cycles * operation.cycles / rates.clock)
    return Timed(
        seconds=max(compute, memory, rates.calibration.overhead),
        bound="compute" if compute >= memory else "memory",
    )
