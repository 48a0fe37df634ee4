"""What lies between a decoder's products, each one native call on one CPU."""

from fornax.kernels._layer.gated import (
    ACTIVATIONS,
    Activation,
    GatedUnitCall,
    gated_linear_unit,
    gated_linear_unit_operation,
)
from fornax.kernels._layer.greedy import ArgmaxCall, argmax, argmax_operation
from fornax.kernels._layer.rotary import (
    RotaryCall,
    rotary_embedding,
    rotary_embedding_operation,
)
from fornax.kernels._layer.rows import TakeRowsCall, take_rows, take_rows_operation
from fornax.kernels._layer.sampling import (
    FilterLogitsCall,
    SampleTokensCall,
    TokenFilters,
    filter_logits,
    filter_logits_operation,
    sample_tokens,
    sample_tokens_operation,
)

__all__ = [
    "ACTIVATIONS",
    "Activation",
    "ArgmaxCall",
    "FilterLogitsCall",
    "GatedUnitCall",
    "RotaryCall",
    "SampleTokensCall",
    "TakeRowsCall",
    "TokenFilters",
    "argmax",
    "argmax_operation",
    "filter_logits",
    "filter_logits_operation",
    "gated_linear_unit",
    "gated_linear_unit_operation",
    "rotary_embedding",
    "rotary_embedding_operation",
    "sample_tokens",
    "sample_tokens_operation",
    "take_rows",
    "take_rows_operation",
]
