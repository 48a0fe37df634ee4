"""Freed memory goes back to the system, and only while nothing runs."""

import asyncio

import pytest

from fornax.serving import trim


def test_freed_memory_is_given_back_when_idle(monkeypatch):
    held, trims = [100 * 2**20], []

    def give_back():
        trims.append(held[0])
        held[0] = 2**20

    monkeypatch.setattr(trim, "_trimmer", lambda: give_back)
    monkeypatch.setattr(trim, "resident_bytes", lambda: held[0])
    busy = [True]

    async def run():
        task = asyncio.create_task(trim.give_back_memory(lambda: busy[0], seconds=0.001))
        await asyncio.sleep(0.02)
        assert trims == []
        busy[0] = False
        await asyncio.sleep(0.02)
        assert trims == [100 * 2**20]  # and not again: there is nothing new to give
        held[0] = 70 * 2**20
        await asyncio.sleep(0.02)
        assert trims[1:] == [70 * 2**20]
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())


def test_the_real_thing_runs():
    assert trim.resident_bytes() > 2**20
    give_back = trim._trimmer()
    assert give_back is not None
    give_back()
