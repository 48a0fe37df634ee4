"""Rows in groups, each group multiplied by a matrix of its own: what experts are made of."""

from fornax.kernels._grouped.call import GroupedCall
from fornax.kernels._grouped.operation import grouped_matmul, grouped_matmul_operation
from fornax.kernels._grouped.packed import PackedGroupedCall, packed_grouped_matmul_operation
from fornax.kernels._grouped.tpu import GroupedTiles, grouped_tiles
from fornax.kernels._grouped.weight import GroupedWeight

__all__ = [
    "GroupedCall",
    "GroupedTiles",
    "GroupedWeight",
    "PackedGroupedCall",
    "grouped_matmul",
    "grouped_matmul_operation",
    "grouped_tiles",
    "packed_grouped_matmul_operation",
]
