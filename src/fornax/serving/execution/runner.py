"""One function on one placement: its compiled programs, and the way of a batch through one."""

import dataclasses
import math
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import jax
import jax.monitoring
import numpy as np

from fornax.config.errors import ServingCode, ServingError
from fornax.config.frames import LinkError
from fornax.export.buckets import assemble, take
from fornax.export.dtypes import BYTES, numpy_dtype
from fornax.export.program import Program
from fornax.export.spec import Signature
from fornax.mesh.hosts import is_lost
from fornax.serving.batching import Batch, Key, Waiting

__all__ = ["Compilations", "Computed", "Prepared", "Runner", "compilations"]

_COMPILED = "/jax/core/compile/backend_compile_duration"


class Answering(Protocol):
    """What computes answers, and must find all it needs compiled."""

    late: int


class Compilations(threading.local):
    """What this thread answers for at the moment; None while it may compile."""

    answering: Answering | None = None


compilations = Compilations()
"""Set `answering` for as long as a thread computes answers: what is compiled then is `late`."""


def _heard(event: str, duration_secs: float, **kwargs: str | int) -> None:
    del duration_secs, kwargs
    if event == _COMPILED and compilations.answering is not None:
        compilations.answering.late += 1


jax.monitoring.register_event_duration_secs_listener(_heard)


_RUNS = 5
_DRIFT = 1.01
"""A batch that took longer than was known raises it by this much at most."""
_ENOUGH = 0.02
"""Seconds of measuring after which a program's time is known."""
_AGREE = 1.25
"""The two fastest runs are this close, or something else held them up."""
_LONG = 1.0
"""Seconds beside which what XLA does in a first run alone (20 to 50 ms were seen) is nothing."""


@dataclasses.dataclass(slots=True)
class Prepared:
    """A compiled program and what is known of it."""

    program: Program
    dims: Mapping[str, int]
    elements: int
    """Of all inputs."""
    seconds: float = 0.0
    """From requests to answers, at best, lately."""

    def took(self, seconds: float) -> None:
        """A batch took this long: a shorter time is believed at once, a longer one slowly."""
        if seconds < self.seconds:
            self.seconds = seconds
        else:
            self.seconds = min(seconds, _DRIFT * self.seconds)


@dataclasses.dataclass(slots=True)
class Computed:
    """What became of a batch: answers in its requests' order, or one error for all."""

    answers: Sequence[Mapping[str, np.ndarray]] = ()
    error: Exception | None = None
    input_ns: int = 0
    infer_ns: int = 0
    output_ns: int = 0


class Runner:
    """The programs of one function on one device or mesh."""

    def __init__(
        self,
        signature: Signature,
        prepared: Mapping[tuple[int, Key], Prepared],
        *,
        on_host: bool,
        wait_inside: bool,
        lock: AbstractContextManager,
    ):
        """Programs by bucket rows and padded shape.

        `on_host`: the device's memory is the host's. `wait_inside`: a program is waited for
        under the lock, so that the device has one at a time.
        """
        self.signature = signature
        self.prepared = dict(prepared)
        self.late = 0
        """Programs compiled while requests waited for them: a defect."""
        self._on_host = on_host
        self._wait_inside = wait_inside
        self.lock = lock
        bytes_ = any(spec.dtype == BYTES for spec in signature.inputs.values())
        self._plain = not signature.lengths and not bytes_

    def compute(self, batch: Batch, *, alone: bool = False) -> Computed:
        """Compute a batch and wait for it; whatever goes wrong is in what is returned.

        `alone`: without waiting for the lock.
        """
        compilations.answering = self
        try:
            return self._compute(batch, alone)
        except Exception as error:
            return Computed(error=error)
        finally:
            compilations.answering = None

    def _compute(self, batch: Batch, alone: bool) -> Computed:
        began = time.monotonic_ns()
        prepared = self.prepared[batch.bucket, batch.key]
        requests = [each.inputs for each in batch.requests]
        # XLA may read these arrays in place: they live until the outputs are here.
        program = prepared.program
        whole = len(requests) == 1 and self._plain and _fills(requests[0], program.shapes)
        inputs = requests[0] if whole else assemble(self.signature, prepared.dims, requests)
        buffers = program.put(inputs)
        assembled = time.monotonic_ns()
        if alone:
            outputs = program.run(buffers)
        else:
            with self.lock:
                outputs = program.run(buffers)
                if self._wait_inside:
                    jax.block_until_ready(outputs)
        if not self._on_host:
            for each in outputs:
                each.copy_to_host_async()
            jax.block_until_ready(outputs)
        computed = time.monotonic_ns()
        # On CPU these are views of the results, and wait for them.
        host = {name: np.asarray(each) for name, each in zip(program.outputs, outputs, strict=True)}
        if self._on_host:
            computed = time.monotonic_ns()
        answers = [host] if whole else take(self.signature, prepared.dims, host, requests)
        return Computed(
            answers, None, assembled - began, computed - assembled, time.monotonic_ns() - computed
        )

    def measure(self, bucket: int, key: Key, waiting: Waiting) -> None:
        """Run a program on a full bucket until its time is known.

        Raises:
          Exception: what running it raised.
        """
        prepared = self.prepared[bucket, key]
        batch = Batch([waiting], bucket, bucket, key)
        best = self._timed(batch)
        if best < _LONG:  # else the run that warms it up is measure enough
            until = time.monotonic() + _ENOUGH
            second = math.inf
            for _ in range(_RUNS):
                best, second = sorted((best, second, self._timed(batch)))[:2]
                if time.monotonic() > until and second < _AGREE * best:
                    break
        prepared.seconds = best

    def _timed(self, batch: Batch) -> float:
        start = time.monotonic()
        self._compute(batch, False)
        return time.monotonic() - start


def _fills(request: Mapping[str, np.ndarray], shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether a request has a bucket's very shapes, so that there is nothing to pad or to cut."""
    return all(request[name].shape == shape for name, shape in shapes.items())


def sample(signature: Signature, dims: Mapping[str, int]) -> dict[str, np.ndarray]:
    """A request that fills a bucket, for warming up."""
    arrays = {}
    for name, spec in signature.inputs.items():
        sizes = spec.sizes(dims)
        if spec.dtype == BYTES:
            arrays[name] = np.full(sizes[:-1], b"\x01" * sizes[-1], object)
        else:
            fill = spec.pad if spec.low is None else spec.low
            arrays[name] = np.full(sizes, fill, numpy_dtype(spec.dtype))
    return arrays


def compute_error(error: Exception) -> ServingError:
    """The error that a client sees for what computing raised."""
    if isinstance(error, ServingError):
        return error
    if isinstance(error, LinkError) or is_lost(error):
        return ServingError(
            ServingCode.UNAVAILABLE,
            "a process of this server ended while the request was computed; send it again",
        )
    text = f"{type(error).__name__}: {error}".split("\n")[0]
    full = "RESOURCE_EXHAUSTED" in text or isinstance(error, MemoryError)
    code = ServingCode.RESOURCE_EXHAUSTED if full else ServingCode.INTERNAL
    return ServingError(code, f"the model could not be computed: {text}")
