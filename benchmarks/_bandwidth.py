"""How fast this machine's processor reads memory: the limit of decoding at batch 1."""

import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

READERS: tuple[tuple[type, Callable[[np.ndarray], object]], ...] = (
    (np.int64, np.max),
    (np.float32, lambda part: np.dot(part, part)),
)
"""Vectorised single-pass reads that release the interpreter's lock; the fastest counts."""


def read_bandwidth(
    size: int,
    threads: int,
    seconds: float = 1.0,
    summary: Callable[[list[float]], float] = statistics.median,
) -> float:
    """Return the rate, in bytes a second, at which `threads` threads read `size` bytes again and
    again, by the better of the readers: what fits into a cache is read from there, as weights of
    that size would be. `summary` is that of the contestants, a median or `max` beside least times:
    on a shared machine single reads are up to twice as fast as the median."""
    return max(summary(_rates(size, threads, seconds / len(READERS), *read)) for read in READERS)


def _rates(
    size: int, threads: int, seconds: float, dtype: type, read: Callable[[np.ndarray], object]
) -> list[float]:
    data = np.ones(size // np.dtype(dtype).itemsize, dtype)
    parts = np.array_split(data, threads)
    rates = []
    with ThreadPoolExecutor(threads) as pool:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            start = time.perf_counter()
            list(pool.map(read, parts))
            rates.append(data.nbytes / (time.perf_counter() - start))
    return rates
