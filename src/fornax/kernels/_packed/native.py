"""Packed weights by the native CPU kernel (`_native/linear.cc`).

Legend: L layers, M rows, K inputs, N outputs, P panels of 32 outputs.
"""

from fornax.kernels._packed import plain

__all__ = ["layout", "linear", "unavailable", "unpack"]

layout = plain.layout
linear = plain.linear
unpack = plain.unpack


def unavailable() -> str | None:
    """Say why the native kernel cannot be used."""
    return "it is not here yet"
