"""What lies between a decoder's products, each one native call on one CPU."""

from fornax.kernels._layer.gated import (
    ACTIVATIONS,
    Activation,
    GatedUnitCall,
    gated_linear_unit,
    gated_linear_unit_operation,
)
from fornax.kernels._layer.greedy import ArgmaxCall, argmax, argmax_operation
from fornax.kernels._layer.rows import TakeRowsCall, take_rows, take_rows_operation

__all__ = [
    "ACTIVATIONS",
    "Activation",
    "ArgmaxCall",
    "GatedUnitCall",
    "TakeRowsCall",
    "argmax",
    "argmax_operation",
    "gated_linear_unit",
    "gated_linear_unit_operation",
    "take_rows",
    "take_rows_operation",
]
