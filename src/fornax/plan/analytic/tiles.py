"""What the TPU's tiled layout adds to an array.

An array lies in tiles of 8 x 128 elements of 32 bits over its two minor dimensions (16 x 128 of 16
bits, 32 x 128 of 8). The compiler may choose which dimensions are minor, and takes those that pad
least; a second-minor dimension smaller than the tile gets a smaller power of two.
"""

import itertools
import math
from collections.abc import Sequence

__all__ = ["padded_bytes"]

_LANES = 128


def padded_bytes(shape: Sequence[int], itemsize: int) -> int:
    """Bytes of an array in the layout that pads least."""
    count = math.prod(shape)
    if count == 0:
        return 0
    sizes = [size for size in shape if size > 1]
    if len(sizes) <= 1:
        return -(-count // _LANES) * _LANES * itemsize
    pairs = itertools.permutations(range(len(sizes)), 2)
    return min(_tiled(sizes, rows, lanes) for rows, lanes in pairs) * itemsize


def _tiled(sizes: Sequence[int], rows: int, lanes: int) -> int:
    """Elements with padding, when two dimensions are the minor ones."""
    tile = min(8, 1 << (sizes[rows] - 1).bit_length())
    padded = -(-sizes[rows] // tile) * tile * -(-sizes[lanes] // _LANES) * _LANES
    rest = math.prod(size for index, size in enumerate(sizes) if index not in (rows, lanes))
    return padded * rest
