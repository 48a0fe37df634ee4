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

    def flops(self, operation: Operation) -> float:
        """FLOP/s of products."""
        share = {"attention": self.calibration.attention, "kernel": self.calibration.attention}
        reached = share.get(operation.category, self.calibration.matmul)
        return self.chip.peak(operation.dtype) / self.chip.devices * reached


@dataclass(frozen=True, kw_only=True)
class Timed:
    """The time of one run of an operation, and what it waits for."""

    seconds: float
    bound: Literal["compute", "memory"]


def operation_seconds(operation: Operation, rates: Rates) -> Timed:
    """Time of one run.

    A roofline (Williams et al. 2009): arithmetic and memory traffic overlap, the longer decides.
    Where the compiler prints its estimate of cycles, that counts as arithmetic time if it is
    longer: it knows tiles that are padded and vector work that no count of FLOPs shows.
    """
    compute = operation.flops / rates.flops(operation) if operation.flops else 0.0
    clock = rates.chip.clock
    if operation.cycles is not None and clock:
        compute = max(compute, operation.cycles / clock / rates.calibration.cycles)
    memory = operation.bytes / rates.memory
    least = rates.calibration.overhead
    return Timed(
        seconds=max(compute, memory, least), bound="compute" if compute >= memory else "memory"
    )
