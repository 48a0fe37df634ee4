"""Load over gRPC: calls that carry messages as bytes, several channels of them."""

import asyncio
import contextlib
import itertools
import time
from collections.abc import Awaitable, Callable, Sequence

import grpc

from fornax.config import environment
from fornax.serving.bench.config import HostBenchConfig
from fornax.serving.bench.counts import Counts, Window
from fornax.serving.bench.grpc_target import INFER, OPTIONS, credentials, metadata_of

__all__ = ["grpc_load"]

_PER_CHANNEL = 16
"""Calls that share a connection."""
_PAUSE = 0.05


async def grpc_load(
    requests: list[bytes],
    config: HostBenchConfig,
    *,
    concurrency: int,
    ready: Callable[[], Awaitable[Window]],
) -> Counts:
    """Send `requests` in turn by `concurrency` callers.

    Args:
      ready: awaited when the channels are connected; returns the window.

    Raises OSError when the server takes no connection.
    """
    address, secure = "{}:{}".format(*config.address), credentials(config)
    metadata = metadata_of(next(iter(environment.host_tokens()), None))
    async with contextlib.AsyncExitStack() as stack:
        channels = []
        for _ in range(-(-concurrency // _PER_CHANNEL)):
            channel = (
                grpc.aio.secure_channel(address, secure, OPTIONS)
                if secure
                else grpc.aio.insecure_channel(address, OPTIONS)
            )
            channels.append(await stack.enter_async_context(channel))
        await _connect(channels, config)
        counts = Counts(await ready())
        calls = [channel.unary_unary(INFER) for channel in channels]
        await asyncio.gather(
            *(
                _caller(
                    calls[number % len(calls)],
                    requests[number % len(requests) :] + requests[: number % len(requests)],
                    counts,
                    config.timeout,
                    metadata,
                )
                for number in range(concurrency)
            )
        )
    return counts


async def _connect(channels: Sequence[grpc.aio.Channel], config: HostBenchConfig) -> None:
    try:
        async with asyncio.timeout(config.timeout):
            for channel in channels:
                await channel.channel_ready()
    except TimeoutError:
        raise ConnectionError(f"no connection within {config.timeout:g} s") from None


async def _caller(
    call, requests: Sequence[bytes], counts: Counts, timeout: float, metadata
) -> None:
    sending = itertools.cycle(requests)
    while (sent := time.monotonic()) < counts.window.end:
        try:
            await call(next(sending), timeout=timeout, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            timed_out = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            local = timed_out and time.monotonic() - sent >= timeout
            counts.failed("timeout" if local else error.code().name, error.details() or "")
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                await asyncio.sleep(_PAUSE)
        else:
            counts.succeeded(sent)
