"""One measurement after another: processes that send, the server's counters around them."""

import asyncio
import contextlib
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from fornax.config import ServingCode, ServingError
from fornax.serving.bench.config import HostBenchConfig
from fornax.serving.bench.counts import Counts, Window
from fornax.serving.bench.inputs import Tensors, generate, read_inputs
from fornax.serving.bench.target import Statistics, make_target

__all__ = ["Measured", "bench_host"]

_START = 30.0
"""Seconds that a process may take to start and connect."""


@dataclass(kw_only=True)
class Measured:
    """What was measured at one concurrency."""

    concurrency: int
    seconds: float
    rows: float
    """Rows of a request, on average."""
    latencies: np.ndarray = field(repr=False)
    """Seconds of each request that succeeded, as the client saw it."""
    errors: Counter[str]
    examples: dict[str, str]
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
    target = make_target(config)
    metadata = target.inputs()
    if config.input is not None:
        tensors = read_inputs(config.input, metadata)
    else:
        tensors = generate(
            metadata,
            rows=config.rows,
            shapes=config.shapes(),
            count=config.distinct,
            seed=config.seed,
        )
    requests = [target.encode(each) for each in tensors]
    for concurrency in config.concurrency:
        if progress is not None:
            progress(concurrency)
        before = target.statistics()
        count = _processes(config, concurrency)
        found = _measure(config, requests, concurrency, count)
        after = target.statistics()
        known = before is not None and after is not None
        yield Measured(
            concurrency=concurrency,
            seconds=config.seconds,
            rows=_rows(tensors),
            latencies=np.concatenate([np.asarray(part.latencies) for part in found]),
            errors=sum((part.errors for part in found), Counter()),
            examples={k: v for part in found for k, v in part.examples.items()},
            server=after.since(before) if known else None,  # pyrefly: ignore[missing-attribute]
            processes=count,
        )


def _rows(tensors: Sequence[Tensors]) -> float:
    """Mean rows of a request: the size of the first dimension of its first tensor."""
    firsts = [next(iter(each.values())) for each in tensors]
    return float(np.mean([array.shape[0] if array.ndim else 1 for array in firsts]))


def _processes(config: HostBenchConfig, concurrency: int) -> int:
    wanted = config.processes or max(1, (os.cpu_count() or 1) // 2)
    return min(wanted, concurrency)


def _measure(
    config: HostBenchConfig, requests: Sequence[bytes], concurrency: int, count: int
) -> list[Counts]:
    shares = [concurrency // count + (number < concurrency % count) for number in range(count)]
    if count == 1:

        async def at_once() -> Window:
            return _window(config)

        with _reported(config):
            return [_run(_load(config, requests, concurrency, at_once))]
    return _in_processes(config, requests, shares)


def _window(config: HostBenchConfig) -> Window:
    start = time.monotonic() + config.warmup_seconds
    return Window(start, start + config.seconds)


@contextlib.contextmanager
def _reported(config: HostBenchConfig) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _unreachable(config, str(error)) from error


def _unreachable(config: HostBenchConfig, why: str) -> ServingError:
    return ServingError(
        ServingCode.UNAVAILABLE,
        "the server at {}:{} took no connection ({}); look at its log".format(*config.address, why),
    )


async def _load(
    config: HostBenchConfig,
    requests: Sequence[bytes],
    concurrency: int,
    ready: Callable[[], Awaitable[Window]],
) -> Counts:
    if config.protocol == "http":
        from fornax.serving.bench.http_load import http_load

        return await http_load(
            requests,
            address=config.address,
            tls=config.tls_context(),
            concurrency=concurrency,
            timeout=config.timeout,
            ready=ready,
        )
    from fornax.serving.bench.grpc_load import grpc_load

    return await grpc_load(list(requests), config, concurrency=concurrency, ready=ready)


def _run(work: Coroutine[Any, Any, Counts]) -> Counts:
    try:
        import uvloop
    except ImportError:  # as on Windows
        return asyncio.run(work)
    return uvloop.run(work)


def _in_processes(
    config: HostBenchConfig, requests: Sequence[bytes], shares: Sequence[int]
) -> list[Counts]:
    context = multiprocessing.get_context("spawn")
    workers = []
    try:
        for share in shares:
            ours, theirs = context.Pipe()
            worker = context.Process(
                target=_worker, args=(theirs, config, list(requests), share), daemon=True
            )
            worker.start()
            theirs.close()
            workers.append((worker, ours))
        for _, pipe in workers:
            _expect(pipe, _START, config)
        window = _window(config)
        for _, pipe in workers:
            pipe.send(window)
        wait = config.warmup_seconds + config.seconds + 2 * config.timeout
        return [_expect(pipe, wait, config) for _, pipe in workers]
    finally:
        for worker, pipe in workers:
            pipe.close()
            worker.join(1.0)
            if worker.is_alive():
                worker.kill()
                worker.join()


def _expect(pipe: Connection, seconds: float, config: HostBenchConfig) -> Any:
    try:
        if not pipe.poll(seconds):
            raise _unreachable(config, f"a sending process said nothing for {seconds:g} s")
        found = pipe.recv()
    except EOFError:
        raise _unreachable(config, "a sending process ended early") from None
    if isinstance(found, str):
        raise _unreachable(config, found)
    return found


def _worker(pipe: Connection, config: HostBenchConfig, requests: list[bytes], share: int) -> None:
    """A process that sends its share."""

    async def ready() -> Window:
        pipe.send(None)
        return await asyncio.to_thread(pipe.recv)

    with contextlib.suppress(EOFError, BrokenPipeError, KeyboardInterrupt):  # the parent is gone
        try:
            pipe.send(_run(_load(config, requests, share, ready)))
        except OSError as error:
            pipe.send(str(error))
