"""How fast this machine's processor reads memory and multiplies: the limits of decoding."""

import concurrent.futures
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

SIDE = 2048
"""Rows and columns of the matrices whose products are timed."""
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
    """Return the rate, in bytes per second, at which `threads` threads read `size` bytes again and
    again, by the better of the readers: what fits into a cache is read from there, as weights of
    that size would be. `summary` is that of the contestants, a median or `max` beside least times:
    on a shared machine single reads are up to twice as fast as the median."""
    return max(summary(_rates(size, threads, seconds / len(READERS), *read)) for read in READERS)


def product_rates(threads: int, seconds: float = 2.0) -> dict[str, float]:
    """FLOP/s of square products by dtype, the best of `seconds` each, in a process of its own that
    has as many cores as `threads`.

    Bfloat16 matrices can be widened first: their products are at least as fast as those of float32.
    """
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as pool:
        rates = {
            dtype: pool.submit(_product_rate, dtype, threads, seconds).result()
            for dtype in ("float32", "bfloat16")
        }
    return {**rates, "bfloat16": max(rates.values())}


def _product_rate(dtype: str, threads: int, seconds: float) -> float:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    import jax
    import jax.numpy as jnp

    multiply = jax.jit(lambda x: jnp.matmul(x, x, preferred_element_type=jnp.float32))
    x = jnp.ones((SIDE, SIDE), dtype)
    multiply(x).block_until_ready()
    least, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        multiply(x).block_until_ready()
        least = min(least, time.perf_counter() - start)
    return 2 * SIDE**3 / least


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
