"""Freed memory goes back to the system, and only while nothing runs."""

import asyncio
import contextlib
import time

from fornax.serving import process

MB = 2**20


def _burst():
    """Memory of malloc's own, larger than Python's pools, and a piece above it, without which the
    heap would shrink by itself."""
    return [bytes(2000) for _ in range(80_000)], bytes(2000)


async def _until(true, wrong):
    until = time.monotonic() + 120
    while not true():
        assert time.monotonic() < until, wrong
        await asyncio.sleep(0.01)


def test_freed_memory_is_given_back_when_idle():
    held, above = _burst()
    before = process.resident_bytes()
    del held
    late: list[bytes] = []
    looks, count = 0, None

    def answered():
        nonlocal looks
        looks += 1
        if count == 2 and looks == 2:
            late.clear()
        return count

    async def run():
        nonlocal count, looks
        task = asyncio.create_task(process.give_back_memory(answered, seconds=0.01))
        await _until(lambda: looks > 5, "nobody looks")
        assert process.resident_bytes() > before - 20 * MB
        count = 1
        given = before - 100 * MB
        await _until(lambda: process.resident_bytes() < given, "nothing was given back")
        looks = 0
        await _until(lambda: looks > 1, "nobody looks any more")

        # A library holds what a request brought until after the first look: it is asked again.
        pieces, second = _burst()
        late.extend(pieces)
        del pieces
        full = process.resident_bytes()
        looks, count = 0, 2
        await _until(lambda: process.resident_bytes() < full - 100 * MB, "it was asked once")
        assert second
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert above
