"""Measuring implementations against each other, when asked: `with kernels.autotuning():`."""

import contextlib
import contextvars
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

__all__ = ["autotuning", "race", "wanted"]

_ROUNDS = 3
_LEAST_SECONDS = 0.01

_log = logging.getLogger("fornax.kernels")

_wanted: contextvars.ContextVar[bool] = contextvars.ContextVar("autotuning", default=False)


@contextlib.contextmanager
def autotuning() -> Iterator[None]:
    """Measure every new kind of call made (or traced) inside this block, and keep the results.

    Each implementation that can run a call is compiled and timed on made-up inputs of its shapes,
    with gradients, on the default device; under a mesh these are the shapes of one device's share.
    One that raises loses, and its error is kept with the result. Later processes on this machine
    use the fastest without measuring. Outside the block nothing is ever measured.
    """
    token = _wanted.set(True)
    try:
        yield
    finally:
        _wanted.reset(token)


def wanted() -> bool:
    """Return whether the caller is inside `autotuning`."""
    return _wanted.get()


def race(
    operation: str,
    contestants: Mapping[str, Callable[[], Callable[[], object]]],
    *,
    begins: Callable[[str], object] = lambda name: None,
) -> tuple[dict[str, float], dict[str, str]]:
    """Measure contestants against each other in a few interleaved turns.

    Runs in a thread of its own, because the caller may be in the middle of tracing a program, and
    tracing belongs to its thread; so does the mesh in use: each contestant runs on one device.

    Args:
        operation: what is measured, for the log.
        contestants: name to a function that prepares the inputs and returns another, which does
            the work once and returns its arrays. One that raises is out, and the others continue.
        begins: told the name before each turn of a contestant.

    Returns:
        The least seconds of each contestant that ran, and the error of each that raised.
    """
    with ThreadPoolExecutor(1) as thread:
        seconds, failures = thread.submit(_race, contestants, begins).result()
    for name, failure in failures.items():
        _log.warning("measuring %s: %s failed and is left out: %s", operation, name, failure)
    return seconds, failures


def _race(
    contestants: Mapping[str, Callable[[], Callable[[], object]]],
    begins: Callable[[str], object],
) -> tuple[dict[str, float], dict[str, str]]:
    seconds: dict[str, float] = {}
    failures: dict[str, str] = {}
    running: dict[str, Callable[[], Any]] = {}
    for turn in range(1 + _ROUNDS):
        for name in [n for n in contestants if n not in failures]:
            begins(name)
            try:
                if not turn:  # prepares and compiles
                    running[name] = contestants[name]()
                taken = _seconds(running[name])
            except Exception as error:
                failures[name] = _first_line(error)
                seconds.pop(name, None)
                continue
            if turn:
                seconds[name] = min(seconds.get(name, taken), taken)
    return seconds, failures


def _seconds(work: Callable[[], object]) -> float:
    """Of one run; the mean of many where one is too short for a clock."""
    runs, start = 0, time.perf_counter()
    while True:
        jax.block_until_ready(work())
        runs += 1
        taken = time.perf_counter() - start
        if taken > _LEAST_SECONDS:
            return taken / runs


def _first_line(error: Exception) -> str:
    """The error in a line: compilers append whole programs."""
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text[:200]}"
