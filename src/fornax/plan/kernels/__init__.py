"""The kernels of a run: its calls, how fast each implementation runs them here, what is kept."""

from fornax.plan.kernels.calls import KernelCall, calls_of_serving, calls_of_training
from fornax.plan.kernels.measure import Measurement, measure
from fornax.plan.kernels.report import list_text, measured_text, operation_text

__all__ = [
    "KernelCall",
    "Measurement",
    "calls_of_serving",
    "calls_of_training",
    "list_text",
    "measure",
    "measured_text",
    "operation_text",
]
