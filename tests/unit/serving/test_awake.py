"""The loop stays awake for a moment after a lone request, and no longer."""

import asyncio
import time

import pytest

from fornax.serving.execution.awake import Awake


def looks(seconds: float, busy: bool) -> tuple[int, float]:
    """How often a loop turns in 30 ms after a request, and how long it looked for another."""

    async def run() -> tuple[int, float]:
        loop = asyncio.get_running_loop()
        begun = last = time.monotonic()
        turns = 0
        look = Awake._look

        class Counted(Awake):
            def _look(self, loop: asyncio.AbstractEventLoop) -> None:
                nonlocal turns, last
                turns, last = turns + 1, time.monotonic()
                look(self, loop)

        Counted(seconds, lambda: busy).stay(loop)
        await asyncio.sleep(0.03)
        return turns, last - begun

    return asyncio.run(run())


@pytest.mark.parametrize(("seconds", "busy", "most"), [(0.0, False, 0), (0.01, True, 1)])
def test_without_time_or_beside_a_thread_it_sleeps(seconds, busy, most):
    assert looks(seconds, busy)[0] == most


def test_it_looks_for_its_time_and_sleeps_then():
    turns, took = looks(0.01, busy=False)
    assert turns > 3
    assert took < 0.03
