"""Whether a small program is divided over the processor's threads: both ways are run, and timed.

Two threads halve a product of ten milliseconds and double one of fifty microseconds. Both ways must
give the same bits, or a bucket would answer otherwise than the function it holds.
"""

import statistics
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from fornax.export.buckets import assemble
from fornax.export.bundle import Bundle
from fornax.export.golden import examples
from fornax.export.program import Program
from fornax.export.undivided import Undivided
from fornax.serving.execution.runner import Prepared, Runner

__all__ = ["choose_threads"]

TINY_SECONDS, SMALL_SECONDS = 40e-6, 2e-3
"""A program that takes less is too small for XLA to divide; one that takes longer always is."""
_FASTER = 0.9
"""An undivided program must take no more than this part of the time."""
_RUNS = 24
_LONGEST = 0.05
"""Seconds for the runs of one program."""


def choose_threads(
    bundle: Bundle, undivided: Undivided, runner: Runner, options: Mapping[str, Any] | None
) -> int:
    """Have each small program of a runner on one CPU device run the way that is faster.

    Args:
      undivided: shares the runner's weights.
      options: XLA's, as the programs were compiled with.

    Returns:
      how many are not divided.
    """
    chosen, name = 0, runner.signature.name
    for prepared in runner.prepared.values():
        if not TINY_SECONDS <= prepared.seconds <= SMALL_SECONDS:
            continue
        other = bundle.compile(
            name, prepared.dims, undivided.weights, undivided.placement, options=options
        )
        if _better(other, prepared, runner):
            prepared.program = other
            chosen += 1
    return chosen


def _better(other: Program, prepared: Prepared, runner: Runner) -> bool:
    signature, dims = runner.signature, prepared.dims
    inputs = assemble(signature, dims, examples(signature, dims))
    with runner.lock:
        if not _same(_run(prepared.program, inputs), _run(other, inputs)):
            return False
        divided: list[float] = []
        alone: list[float] = []
        until = time.monotonic() + _LONGEST
        while len(alone) < _RUNS and (len(alone) < 3 or time.monotonic() < until):
            divided.append(_time(prepared.program, inputs))
            alone.append(_time(other, inputs))
    before, after = statistics.median(divided), statistics.median(alone)
    if after > _FASTER * before:
        return False
    prepared.seconds = min(alone)
    return True


def _time(program: Program, inputs: Mapping[str, np.ndarray]) -> float:
    start = time.perf_counter()
    _run(program, inputs)
    return time.perf_counter() - start


def _run(program: Program, inputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    return [np.asarray(each) for each in program.run(program.put(inputs))]


def _same(a: list[Any], b: list[Any]) -> bool:
    return all(x.tobytes() == y.tobytes() for x, y in zip(a, b, strict=True))
