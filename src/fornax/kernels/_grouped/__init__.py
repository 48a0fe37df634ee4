"""Rows in groups, each group multiplied by a matrix of its own: what experts are made of."""

from fornax.kernels._grouped.call import GroupedCall
from fornax.kernels._grouped.operation import grouped_matmul, grouped_matmul_operation

__all__ = ["GroupedCall", "grouped_matmul", "grouped_matmul_operation"]
