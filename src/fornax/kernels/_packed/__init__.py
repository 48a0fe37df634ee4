"""Weights laid out for products that only ever read them, in float32, bfloat16 or few bits."""

from fornax.kernels._packed.formats import Precision
from fornax.kernels._packed.pack import pack
from fornax.kernels._packed.weight import PackedWeight

__all__ = ["PackedWeight", "Precision", "pack"]
