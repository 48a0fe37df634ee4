"""How fast this machine's processor reads memory: the limit of decoding at batch 1."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

READERS: tuple[tuple[type, Callable[[np.ndarray], object]], ...] = (
    (np.int64, np.max),
    (np.float32, lambda part: np.dot(part, part)),
)
"""Vectorised single-pass reads that release the interpreter's lock; the fastest counts."""


def read_bandwidth(size: int, threads: int, seconds: float = 1.0) -> float:
    """Return the best rate, in bytes a second, of `threads` threads reading `size` bytes again and
    again: what fits into a cache is read from there, as weights of that size would be."""
    return max(_rate(size, threads, seconds / len(READERS), *reader) for reader in READERS)


def _rate(
    size: int, threads: int, seconds: float, dtype: type, read: Callable[[np.ndarray], object]
) -> float:
    data = np.ones(size // np.dtype(dtype).itemsize, dtype)
    parts = np.array_split(data, threads)
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            start = time.perf_counter()
            list(pool.map(read, parts))
            best = max(best, data.nbytes / (time.perf_counter() - start))
    return best
