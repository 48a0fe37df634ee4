"""Linear cross-entropy: one signature, several implementations."""

from fornax.kernels._cross_entropy.call import LossSums
from fornax.kernels._cross_entropy.operation import cross_entropy_operation, linear_cross_entropy

__all__ = ["LossSums", "cross_entropy_operation", "linear_cross_entropy"]
