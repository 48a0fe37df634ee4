"""DiLoCo: slices train apart and exchange the changes of their parameters at a fixed interval of
steps."""

from fornax.train.diloco.codec import ExchangeDtype, decode, encode, row_bytes
from fornax.train.diloco.config import DilocoConfig
from fornax.train.diloco.outer import OuterOptimizer, OuterState

__all__ = [
    "DilocoConfig",
    "ExchangeDtype",
    "OuterOptimizer",
    "OuterState",
    "decode",
    "encode",
    "row_bytes",
]
