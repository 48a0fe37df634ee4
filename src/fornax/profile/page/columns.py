"""Integer columns as short text: differences, seven bits per byte (LEB128), base64."""

import base64

import numpy as np
from numpy.typing import NDArray

__all__ = ["packed", "packed_differences"]


def packed(values: NDArray[np.integer]) -> str:
    """Integers of at least 0 [n], each in as few bytes as it needs, as base64.

    Raises:
      ValueError: one is below 0.
    """
    left = np.asarray(values, np.int64)
    if left.size and left.min() < 0:
        raise ValueError(f"{left.min()} is below 0; columns hold what is at least 0")
    sizes = np.ones(left.shape, np.int64)
    for bits in range(7, 63, 7):
        sizes += left >> bits > 0
    ends = np.cumsum(sizes)
    out = np.zeros(int(ends[-1]) if left.size else 0, np.uint8)
    starts = ends - sizes
    for byte in range(int(sizes.max(initial=0))):
        has = sizes > byte
        more = (sizes[has] > byte + 1).astype(np.uint8) << 7
        out[starts[has] + byte] = (left[has] >> (7 * byte) & 0x7F).astype(np.uint8) | more
    return base64.b64encode(out.tobytes()).decode()


def packed_differences(values: NDArray[np.integer]) -> str:
    """Any integers [n], each as the difference to the one before, signs in the lowest bit."""
    wide = np.asarray(values, np.int64)
    differences = np.diff(wide, prepend=np.int64(0))
    return packed((differences << 1) ^ (differences >> 63))
