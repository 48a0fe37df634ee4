"""One concurrency after another: processes that send, and the server's counters around them."""

import asyncio
import functools
import itertools
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing.synchronize import Barrier
from threading import BrokenBarrierError

import numpy as np
import uvloop

from fornax.bench.load import run_load
from fornax.bench.v2.config import HostBenchConfig
from fornax.bench.v2.inputs import Tensors, generate, read_inputs
from fornax.bench.v2.target import HttpTarget, Statistics, Target
from fornax.config import ServingCode, ServingError
from fornax.serving.types import TensorMetadata

__all__ = ["Counts", "Measured", "bench_host"]

_START = 30.0
"""Seconds that a process may take to start and connect."""


@dataclass(slots=True)
class Counts:
    """What the clients saw."""

    latencies: list[float] = field(default_factory=list)
    """Seconds from sending to the last byte of the answer, of those that succeeded."""
    errors: Counter[str] = field(default_factory=Counter)
    """By reason."""
    examples: dict[str, str] = field(default_factory=dict)
    """The first message of each reason."""

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(
            self.latencies + other.latencies,
            self.errors + other.errors,
            other.examples | self.examples,
        )


@dataclass(kw_only=True)
class Measured:
    """What was measured at one concurrency."""

    concurrency: int
    seconds: float
    rows: float
    """Rows of a request, on average."""
    counts: Counts = field(repr=False)
    """What all processes saw."""
    server: Statistics | None
    """What the server counted meanwhile, warm-up included; None when it keeps no statistics."""
    processes: int


def bench_host(
    config: HostBenchConfig, progress: Callable[[int], None] | None = None
) -> Iterator[Measured]:
    """Measure at each concurrency in turn.

    Raises:
      ServingError: no server answers, or it has no such model.
      DataError, ConfigError: inputs that are not the model's.
    """
    target = _make_target(config)
    tensors = _tensors(config, target.inputs())
    requests = [target.encode(each) for each in tensors]
    for concurrency in config.concurrency:
        if progress is not None:
            progress(concurrency)
        before = target.statistics()
        processes = min(config.processes or max(1, (os.cpu_count() or 1) // 2), concurrency)
        found = _measure(config, requests, concurrency, processes)
        after = target.statistics()
        yield Measured(
            concurrency=concurrency,
            seconds=config.seconds,
            rows=_rows(tensors),
            counts=functools.reduce(Counts.__add__, found),
            server=None if before is None or after is None else after.since(before),
            processes=processes,
        )


def _make_target(config: HostBenchConfig) -> Target:
    """The server that a config names."""
    if config.protocol == "http":
        return HttpTarget(config)
    from fornax.bench.v2.grpc_target import GrpcTarget

    return GrpcTarget(config)


def _tensors(config: HostBenchConfig, inputs: Sequence[TensorMetadata]) -> list[Tensors]:
    if config.input is not None:
        return read_inputs(config.input, inputs)
    return generate(
        inputs,
        rows=config.rows,
        shapes=config.shapes(),
        count=config.distinct,
        seed=config.seed,
    )


def _rows(tensors: Sequence[Tensors]) -> float:
    """Mean rows of a request: the size of the first dimension of its first tensor."""
    firsts = [next(iter(each.values())) for each in tensors]
    return float(np.mean([array.shape[0] if array.ndim else 1 for array in firsts]))


def _measure(
    config: HostBenchConfig, requests: Sequence[bytes], concurrency: int, processes: int
) -> list[Counts]:
    shares = [concurrency // processes + (n < concurrency % processes) for n in range(processes)]
    try:
        if processes == 1:
            return [uvloop.run(_load(config, requests, concurrency))]
        return _in_processes(config, requests, shares)
    except OSError as error:
        raise ServingError(
            ServingCode.UNAVAILABLE,
            "the server at {}:{} took no connection ({}); look at its log".format(
                *config.address, error
            ),
        ) from error


async def _load(
    config: HostBenchConfig,
    requests: Sequence[bytes],
    clients: int,
    connected: Callable[[], object] | None = None,
) -> Counts:
    """Send `requests` in turn, each client its next when the last is answered.

    What is answered in the `warmup_seconds` is not counted, nor what is after the end.

    Args:
      connected: called in a thread when the connections are open; the time begins when it returns.

    Raises OSError when the server takes no connection.
    """
    target, counts = _make_target(config), Counts()
    try:
        await target.connect(clients)
        if connected is not None:
            await asyncio.to_thread(connected)
        start = time.perf_counter() + config.warmup_seconds
        end = start + config.seconds

        async def send(request: bytes, _: float) -> None:
            sent = time.perf_counter()
            failure = await target.send(request)
            now = time.perf_counter()
            inside = start <= now <= end
            if failure is None:
                if inside:
                    counts.latencies.append(now - sent)
            elif inside or failure.reason == "timeout":
                counts.errors[failure.reason] += 1
                counts.examples.setdefault(*failure)

        coming = zip(itertools.repeat(0.0), itertools.cycle(requests), strict=False)
        await run_load(
            itertools.takewhile(lambda _: time.perf_counter() < end, coming), send, clients
        )
    finally:
        await target.close()
    return counts


_connected: Barrier | None = None
"""In a sending process: all wait here until each has its connections."""


def _set_barrier(barrier: Barrier) -> None:
    global _connected
    _connected = barrier


def _in_processes(
    config: HostBenchConfig, requests: Sequence[bytes], shares: Sequence[int]
) -> list[Counts]:
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(len(shares), timeout=_START)
    with ProcessPoolExecutor(len(shares), context, _set_barrier, (barrier,)) as processes:
        try:
            work = functools.partial(_send_share, config, list(requests))
            return list(processes.map(work, shares))
        except BrokenProcessPool:
            raise ConnectionError("a sending process ended early") from None


def _send_share(config: HostBenchConfig, requests: Sequence[bytes], clients: int) -> Counts:
    """Runs in a process: send a share of the load."""
    assert _connected is not None
    try:
        return uvloop.run(_load(config, requests, clients, _connected.wait))
    except BrokenBarrierError:
        raise ConnectionError("another sending process did not connect") from None
    except BaseException:
        _connected.abort()
        raise
