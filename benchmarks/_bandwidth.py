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


def read_bandwidth(size: int, threads: int, seconds: float = 1.0) -> float:
    """Return the rate, in bytes a second, at which `threads` threads read `size` bytes again and
    again, by the better of the readers: what fits into a cache is read from there, as weights of
    that size would be. It is a median, as contestants' times are: on a shared machine single reads
    are up to twice as fast, whenever neighbours leave the memory alone."""
    return max(_rate(size, threads, seconds / len(READERS), *reader) for reader in READERS)


def _rate(
    size: int, threads: int, seconds: float, dtype: type, read: Callable[[np.ndarray], object]
) -> float:
    data = np.ones(size // np.dtype(dtype).itemsize, dtype)
    parts = np.array_split(data, threads)
    rates = []
    with ThreadPoolExecutor(threads) as pool:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            start = time.perf_counter()
            list(pool.map(read, parts))
            rates.append(data.nbytes / (time.perf_counter() - start))
    return statistics.median(rates)
