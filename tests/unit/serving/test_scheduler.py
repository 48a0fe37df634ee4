"""Batches on a device: overlap, turns between models, and one answer for each request.

The device is a fake whose programs sleep; everything else is the server's own.
"""

import asyncio
import contextlib
import random
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from fornax.config import ServingError
from fornax.config.errors import ServingCode
from fornax.export.spec import Signature, TensorSpec
from fornax.serving.batching import Limit
from fornax.serving.events import Events
from fornax.serving.execution.function import Function
from fornax.serving.execution.runner import Computed, Prepared
from fornax.serving.execution.scheduler import DeviceScheduler, FairLock
from fornax.serving.settings import Batching, ModelSettings
from fornax.serving.types import InferRequest

SIGNATURE = Signature(
    name="f",
    inputs={"x": TensorSpec(name="x", shape=("b",), dtype="float32")},
    outputs={"y": TensorSpec(name="y", shape=("b",), dtype="float32")},
    batch="b",
    exact=(),
    shapes=({"b": 1}, {"b": 4}),
)


class FakeRunner:
    """Doubles its inputs after a while, and once `go_on` is set; refuses batches that hold a 13."""

    def __init__(self, scheduler: DeviceScheduler, seconds: float):
        self.signature = SIGNATURE
        self.prepared = {(rows, ()): Prepared(None, {"b": rows}, rows, seconds) for rows in (1, 4)}
        self.late = 0
        self.seconds = seconds
        self.lock = scheduler.lock
        self.batches = []
        self.threads = set()
        self.at_once = self.most_at_once = 0
        self.go_on = threading.Event()
        self.go_on.set()
        self.clock = [0.0]
        """Seconds that it has computed."""

    def compute(self, batch, *, alone=False):
        self.threads.add(threading.current_thread())
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        self.batches.append([each.inputs["x"] for each in batch.requests])
        try:
            with contextlib.nullcontext() if alone else self.lock:
                time.sleep(self.seconds)
                assert self.go_on.wait(120)
                self.clock[0] += self.seconds
            if any((each.inputs["x"] == 13).any() for each in batch.requests):
                return Computed(error=RuntimeError("thirteen"))
            answers = [{"y": each.inputs["x"] * 2} for each in batch.requests]
            return Computed(answers, None, 0, int(self.seconds * 1e9), 0)
        finally:
            self.at_once -= 1


def serve(schedulers, seconds, events=None, **settings):
    runners = [FakeRunner(scheduler, seconds) for scheduler in schedulers]
    chosen = ModelSettings(**settings)
    placed = [
        (scheduler, Limit(chosen.concurrency), r)
        for scheduler, r in zip(schedulers, runners, strict=True)
    ]
    return Function("m", "1", SIGNATURE, placed, chosen, events or Events()), runners


def host_scheduler(name: str = "cpu:0") -> DeviceScheduler:
    return DeviceScheduler(name, on_host=True)


def ask(*values: float, **fields) -> InferRequest:
    return InferRequest("m", {"x": np.array(values, "f")}, **fields)


async def until(condition) -> None:
    """Wait for what threads do."""
    async with asyncio.timeout(120):
        while not condition():
            await asyncio.sleep(0.001)


async def close(*functions: Function) -> None:
    for function in functions:
        await function.drained()
        await function.quiet()
        function.close()


def test_batches_run_in_threads_that_end_with_their_functions():
    async def run():
        scheduler = host_scheduler()
        short, (short_runner,) = serve([scheduler], 1e-5)
        long, (long_runner,) = serve([scheduler], 0.01)
        await asyncio.gather(*[f.submit(ask(1)) for f in (short, long) for _ in range(9)])
        here = threading.current_thread()
        assert here not in short_runner.threads | long_runner.threads
        threads = list(scheduler._threads)
        await close(short, long)
        for thread in threads:
            thread.join(120)
            assert not thread.is_alive()

    asyncio.run(run())


def test_what_comes_while_a_batch_runs_makes_the_next_one():
    async def run():
        function, (runner,) = serve([host_scheduler()], 0.02)
        runner.go_on.clear()
        first = function.submit(ask(1))
        await until(lambda: runner.batches)
        more = [function.submit(ask(value)) for value in (2, 3, 4)]
        runner.go_on.set()
        await asyncio.gather(first, *more)
        assert [len(batch) for batch in runner.batches] == [1, 3]
        await close(function)

    asyncio.run(run())


def test_a_full_batch_is_assembled_while_another_runs_and_a_device_runs_one():
    async def run():
        function, (runner,) = serve([host_scheduler()], 0.02)
        runner.go_on.clear()
        began = time.monotonic()
        futures = [function.submit(ask(1)) for _ in range(16)]
        await until(lambda: runner.at_once == 2)
        runner.go_on.set()
        await asyncio.gather(*futures)
        assert runner.most_at_once == 2  # one waits for the device
        assert time.monotonic() - began > 0.075
        await close(function)

    asyncio.run(run())


@pytest.mark.parametrize("delay_ms", [0.5, 500.0])
def test_a_delay_gathers_requests_and_ends(delay_ms):
    async def run():
        batching = Batching(max_delay_ms=delay_ms)
        function, (runner,) = serve([host_scheduler()], 1e-5, batching=batching)
        began = time.monotonic()
        first = function.submit(ask(1))
        await asyncio.sleep(0)
        second = function.submit(ask(2))
        in_time = time.monotonic() - began < delay_ms * 1e-3
        await asyncio.gather(first, second)
        assert time.monotonic() - began >= delay_ms * 1e-3
        if in_time:  # more may pass between two turns of a busy machine
            assert [len(batch) for batch in runner.batches] == [2]
        await close(function)

    asyncio.run(run())


def test_a_full_batch_waits_for_no_delay():
    async def run():
        batching = Batching(max_delay_ms=600_000.0)
        function, (runner,) = serve([host_scheduler()], 1e-5, batching=batching)
        full = [function.submit(ask(1)) for _ in range(4)]
        await asyncio.wait_for(asyncio.gather(*full), 120)
        assert [len(batch) for batch in runner.batches] == [4]
        await close(function)

    asyncio.run(run())


def test_a_sender_that_gives_up_at_its_deadline_counts_as_late(monkeypatch):
    passed = [0.0]
    clock = SimpleNamespace(
        monotonic=lambda: time.monotonic() + passed[0],
        monotonic_ns=lambda: time.monotonic_ns() + int(passed[0] * 1e9),
    )
    monkeypatch.setattr("fornax.serving.execution.function.time", clock)

    async def run():
        function, (runner,) = serve([host_scheduler()], 0.05)
        runner.go_on.clear()
        running = function.submit(ask(1))
        await until(lambda: runner.batches)
        late = function.submit(ask(1, deadline=time.monotonic() + 600))
        passed[0] = 600.0
        late.cancel()
        runner.go_on.set()
        await running
        await close(function)
        return function.statistics("f")

    counted = asyncio.run(run())
    assert counted.reject == {"DEADLINE_EXCEEDED": 1}
    assert counted.cancel == 0


def test_a_model_has_no_more_batches_under_way_than_its_concurrency():
    async def run(concurrency):
        function, (runner,) = serve([host_scheduler()], 0.01, concurrency=concurrency)
        runner.go_on.clear()
        futures = [function.submit(ask(1)) for _ in range(24)]
        await until(lambda: runner.at_once == concurrency)
        await asyncio.sleep(0.05)
        runner.go_on.set()
        await asyncio.gather(*futures)
        await close(function)
        return runner.most_at_once

    assert [asyncio.run(run(most)) for most in (1, 3)] == [1, 3]


def test_small_batches_do_not_wait_for_a_long_one_on_the_host():
    async def run():
        scheduler = host_scheduler()
        small, _ = serve([scheduler], 1e-5)
        large, (runner,) = serve([scheduler], 0.3)
        runner.go_on.clear()
        slow = large.submit(ask(1))
        await until(lambda: runner.batches)
        await asyncio.wait_for(small.submit(ask(1)), 120)
        assert not slow.done()
        runner.go_on.set()
        await close(small, large)

    asyncio.run(run())


def test_a_flooded_model_leaves_others_their_share_of_the_device(monkeypatch):
    computed = [0.0]  # what a busy machine adds is charged to nobody
    clock = SimpleNamespace(
        monotonic=lambda: computed[0], monotonic_ns=lambda: int(computed[0] * 1e9)
    )
    monkeypatch.setattr("fornax.serving.execution.scheduler.time", clock)

    async def run():
        scheduler = host_scheduler()
        flooded, (greedy,) = serve([scheduler], 0.01)
        modest, (rare,) = serve([scheduler], 0.005)
        greedy.clock = rare.clock = computed
        begun = greedy.batches = rare.batches = []  # by either, in order
        flood = [flooded.submit(ask(1)) for _ in range(4 * 60)]
        between = []
        for number in range(8):
            answer = modest.submit(ask(100 + number))
            before = len(begun)
            await answer
            [mine] = [at for at, (first, *_) in enumerate(begun) if first[0] == 100 + number]
            between.append(mine - before)
        assert max(between) <= 4  # one that runs, one that waits for it, and a turn: not all 60
        flooded.fail_waiting(ServingError(ServingCode.UNAVAILABLE, "enough"))
        await asyncio.gather(*flood, return_exceptions=True)
        await close(flooded, modest)

    asyncio.run(run())


def test_priorities_go_first_and_replicas_take_what_waits():
    async def run():
        schedulers = [host_scheduler("cpu:0"), host_scheduler("cpu:1")]
        function, (left, right) = serve([schedulers[0], schedulers[1]], 0.01)
        right.batches = left.batches
        left.go_on.clear()
        right.go_on.clear()
        low = [function.submit(ask(1, priority=3)) for _ in range(60)]
        await until(lambda: left.at_once == right.at_once == 2)
        before = len(left.batches)
        high = [function.submit(ask(2, priority=1)) for _ in range(4)]
        left.go_on.set()
        right.go_on.set()
        await asyncio.gather(*high, *low)
        urgent = [(np.array(batch) == 2).all() for batch in left.batches].index(True)
        assert urgent <= before + 4  # each scheduler has one that runs and one that waits for it
        assert len(left.threads) == len(right.threads) == 2
        await close(function)

    asyncio.run(run())


def test_turns_are_taken_in_the_order_of_asking():
    turns, order, came = FairLock(), [], threading.Semaphore(0)

    def take(number):
        came.release()
        with turns:
            order.append(number)

    threads = [threading.Thread(target=take, args=(number,)) for number in range(8)]
    with turns:
        for number, thread in enumerate(threads):
            thread.start()
            came.acquire()
            while len(turns._waiting) <= number:
                time.sleep(0.001)
    for thread in threads:
        thread.join(120)
    assert order == list(range(8))


def test_programs_of_two_meshes_are_dispatched_one_after_the_other():
    one, two = (
        DeviceScheduler("a", on_host=False, devices=2),
        DeviceScheduler("b", on_host=False, devices=4),
    )
    assert one.lock is two.lock
    assert DeviceScheduler("c", on_host=False).lock is not one.lock


@pytest.mark.parametrize("seconds", [1e-5, 0.002])
def test_every_request_is_answered_once_in_a_storm(seconds):
    """Clients that leave, deadlines, failures, splits and three priorities, at once."""
    rng = random.Random(3)

    async def run():
        schedulers = [host_scheduler("cpu:0"), host_scheduler("cpu:1")]
        events = Events()
        ends: dict[str, int] = {}
        events.finished.append(lambda r, o: ends.update({r.id: ends.get(r.id, 0) + 1}))
        function, _ = serve(schedulers, seconds, events, batching=Batching(queue_limit=60))
        sent, refusals = [], set()
        for number in range(600):
            values = [float(rng.choice([1, 2, 3, 13]))] * rng.choice([1, 1, 2, 4, 9])
            request = ask(*values, id=str(number), priority=rng.randint(0, 3))
            if rng.random() < 0.3:
                request.deadline = time.monotonic() + rng.choice([1e-4, 0.02])
            try:
                future = function.submit(request)
            except ServingError as error:
                refusals.add(error.code)
                continue
            finally:
                if rng.random() < 0.1:
                    await asyncio.sleep(rng.choice([0, 0.002]))
            sent.append((values, future))
            if rng.random() < 0.2:
                future.cancel()
        results = await asyncio.gather(*[f for _, f in sent], return_exceptions=True)
        for (values, _), result in zip(sent, results, strict=True):
            if isinstance(result, asyncio.CancelledError):
                continue
            if isinstance(result, ServingError):
                late = result.code is ServingCode.DEADLINE_EXCEEDED
                assert late or (result.code is ServingCode.INTERNAL and 13 in values)
            else:
                assert 13 not in values
                np.testing.assert_array_equal(result.outputs["y"], np.array(values) * 2)
        await close(function)
        assert refusals <= {ServingCode.RESOURCE_EXHAUSTED, ServingCode.DEADLINE_EXCEEDED}
        assert set(ends.values()) == {1}
        assert len(ends) == 600
        counters = function.statistics("f")
        assert counters.success + counters.failure + counters.cancel == 600
        assert (counters.pending, counters.queued) == (0, 0)

    asyncio.run(run())
