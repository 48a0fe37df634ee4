"""Weights laid out for products that only ever read them, in float32, bfloat16 or few bits."""

from fornax.kernels._packed.blocks import (
    BLOCKS,
    block_units,
    blocks_table,
    blocks_unavailable,
    lay_out_blocks,
)
from fornax.kernels._packed.formats import Precision
from fornax.kernels._packed.pack import pack, pack_codes
from fornax.kernels._packed.weight import PackedWeight, block_weight

__all__ = [
    "BLOCKS",
    "PackedWeight",
    "Precision",
    "block_units",
    "block_weight",
    "blocks_table",
    "blocks_unavailable",
    "lay_out_blocks",
    "pack",
    "pack_codes",
]
