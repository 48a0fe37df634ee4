"""Measuring implementations against each other, when asked: `with kernels.autotuning():`."""

import contextlib
import contextvars
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

__all__ = ["autotuning", "race", "wanted"]

_ROUNDS = 3

_wanted: contextvars.ContextVar[bool] = contextvars.ContextVar("autotuning", default=False)


@contextlib.contextmanager
def autotuning() -> Iterator[None]:
    """Measure every new kind of call made (or traced) inside this block, and keep the results.

    Each implementation that can run a call is compiled and timed on made-up inputs of its shapes,
    with gradients, on the default device. Later processes on this machine use the fastest without
    measuring. Outside the block nothing is ever measured.
    """
    token = _wanted.set(True)
    try:
        yield
    finally:
        _wanted.reset(token)


def wanted() -> bool:
    """Return whether the caller is inside `autotuning`."""
    return _wanted.get()


def race(contestants: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Return the least seconds of a few interleaved turns of each contestant.

    Runs in a thread of its own, because the caller may be in the middle of tracing a program, and
    tracing belongs to its thread.

    Args:
        contestants: name to a function that does the work once and returns its arrays.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_race, contestants).result()


def _race(contestants: dict[str, Callable[[], Any]]) -> dict[str, float]:
    seconds = dict.fromkeys(contestants, float("inf"))
    for turn in range(1 + _ROUNDS):
        for name, work in contestants.items():
            start = time.perf_counter()
            jax.block_until_ready(work())
            if turn:  # the first turn compiles
                seconds[name] = min(seconds[name], time.perf_counter() - start)
    return seconds
