"""Weights laid out for products that only ever read them, in float32, bfloat16 or int8."""

from fornax.kernels._packed.pack import pack
from fornax.kernels._packed.weight import PackedWeight

__all__ = ["PackedWeight", "pack"]
