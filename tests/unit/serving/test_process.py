"""Freed memory goes back to the system, and only while nothing runs."""

import asyncio
import contextlib
import time

from fornax.serving import process

MB = 2**20


def test_freed_memory_is_given_back_when_idle():
    held = [bytes(2000) for _ in range(80_000)]  # of malloc's own: larger than Python pools
    above = bytes(2000)  # or the heap would shrink by itself
    before = process.resident_bytes()
    del held
    busy = True

    async def run():
        nonlocal busy
        task = asyncio.create_task(process.give_back_memory(lambda: busy, seconds=0.01))
        await asyncio.sleep(0.1)
        assert process.resident_bytes() > before - 20 * MB
        busy, until = False, time.monotonic() + 10
        while process.resident_bytes() > before - 100 * MB:
            assert time.monotonic() < until, "nothing was given back"
            await asyncio.sleep(0.01)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert above
