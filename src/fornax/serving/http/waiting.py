"""Waiting for an answer no longer than the request may take, nor than its client is there."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from time import monotonic
from typing import Any

from fornax.config import ServingCode, ServingError
from fornax.serving.http.bodies import ClientLeft
from fornax.serving.types import InferRequest, InferResult

__all__ = ["awaited", "cancelled"]

_EARLY = 0.005
"""Seconds by which a timer may come before its time: loops count in milliseconds."""


@contextlib.asynccontextmanager
async def awaited(
    future: "asyncio.Future[InferResult]", request: InferRequest, scope: Any, receive: Any
) -> AsyncIterator["asyncio.Future[InferResult]"]:
    """The host's answer to a request, which is cancelled when its client leaves, its time is up, or
    by an error inside.

    Raises ClientLeft, or ServingError for the time and for a host that stops.
    """
    connection = scope.get(
        "fornax.connection"
    )  # without one, `receive` tells of a client that left
    watch = timer = None
    if connection is not None:
        connection.pending = future
    else:
        watch = asyncio.ensure_future(_cancel_when_gone(receive, future))
    if request.deadline is not None:
        left = max(0.0, request.deadline - monotonic())
        timer = asyncio.get_running_loop().call_later(left, future.cancel)
    try:
        yield future
    except asyncio.CancelledError:
        gone = connection.pending is None if watch is None else watch.done()
        if gone and not _late(request):
            raise ClientLeft from None
        raise cancelled(request) from None
    finally:
        future.cancel()  # of use where its answer could not be sent
        if connection is not None:
            connection.pending = None
        if watch is not None:
            watch.cancel()
        if timer is not None:
            timer.cancel()


def cancelled(request: InferRequest) -> ServingError:
    """What became of a request that was cancelled, whose client is still there."""
    if request.deadline is not None and _late(request):
        seconds = request.deadline - request.received
        return ServingError(ServingCode.DEADLINE_EXCEEDED, f"the request's {seconds:g} s are over")
    # The host dropped it, or the time to drain was over.
    return ServingError(
        ServingCode.UNAVAILABLE, "the server stopped before it answered; send this again"
    )


def _late(request: InferRequest) -> bool:
    return request.deadline is not None and monotonic() >= request.deadline - _EARLY


async def _cancel_when_gone(receive: Any, future: "asyncio.Future[InferResult]") -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    future.cancel()
