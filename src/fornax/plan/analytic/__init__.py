"""What a run would need and take, from closed forms: no compiler, no device."""

from fornax.plan.analytic.estimate import estimate, kernel_choices
from fornax.plan.analytic.result import (
    CollectiveEstimate,
    Estimate,
    MemoryEstimate,
    OperationEstimate,
)

__all__ = [
    "CollectiveEstimate",
    "Estimate",
    "MemoryEstimate",
    "OperationEstimate",
    "estimate",
    "kernel_choices",
]
