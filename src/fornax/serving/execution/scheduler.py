"""Scheduling of batches on one device, or on the devices of one mesh.

Batches are picked in the event loop and computed in the scheduler's threads, where one batch is
assembled, sent and unpacked while another computes, and the loop reads requests meanwhile. The next
one is picked late, when the device is about to be free or the batch could not grow any more.

On a CPU, a function whose programs are all short does not wait for another's long batch: one batch
of such functions may run beside it.

The loop never waits for a lock. Programs of meshes share one lock while they are dispatched, so
that all devices see them in one order: otherwise two that communicate could wait for each other.
"""

import asyncio
import dataclasses
import threading
import time
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from queue import SimpleQueue
from typing import Protocol

from jax.profiler import TraceAnnotation

from fornax.serving.batching import Batch, Share, Shares, Waiting
from fornax.serving.execution.runner import Computed, Runner

__all__ = ["SHORT_SECONDS", "Claim", "DeviceScheduler", "FairLock"]


class FairLock:
    """A lock that goes to the thread that has waited longest.

    `threading.Lock` goes to the thread that asks first once it is free, and that is often the
    thread that has just released it: a batch that was assembled in time would see others overtake
    it.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._taken = False
        self._waiting: deque[threading.Lock] = deque()

    def __enter__(self) -> None:
        with self._mutex:
            if not self._taken:
                self._taken = True
                return
            turn = threading.Lock()
            turn.acquire()
            self._waiting.append(turn)
        turn.acquire()

    def __exit__(self, *_: object) -> None:
        with self._mutex:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._taken = False


SHORT_SECONDS = 300e-6
"""A function is short if no batch of it takes longer."""
_LONG_SECONDS = 10e-3
"""For batches of at least this time the next one is picked before they end."""
_LEAD = 0.1
"""How long before, as a part of their time."""
_MESHES = FairLock()


class Answers(Protocol):
    """The receiver of what was computed."""

    def overdue(self, now: float) -> None: ...

    def answer(self, batch: Batch, computed: Computed, started: int) -> None: ...


@dataclasses.dataclass(slots=True, eq=False, kw_only=True)
class Claim(Share):
    """One function's claim on one scheduler, with what computes its batches."""

    name: str
    """Its model and function, in profiles."""
    runner: Runner
    answers: Answers
    short: bool = False
    """Whether no batch of it takes long."""


@dataclasses.dataclass(slots=True, eq=False)
class _Work:
    claim: Claim
    batch: Batch
    estimate: float
    started: int
    beside: bool
    """Whether it is a short one that runs beside another's long one."""


class DeviceScheduler:
    """See the module."""

    def __init__(self, name: str, *, on_host: bool, devices: int = 1):
        """A scheduler of this many devices; `on_host`: CPU devices."""
        self.name = name
        self.on_host = on_host
        self.lock: AbstractContextManager = (
            _MESHES if devices > 1 else FairLock() if on_host else nullcontext()
        )
        self.shares: Shares[Claim] = Shares()
        self.running = 0
        """Batches in its threads, but for the short one beside them."""
        self.slots = 1
        """Batches that may be in its threads at once: the most that a model here may have."""
        self._again: deque[_Work] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = 0.0
        self._kicked = False
        self._beside = 0
        """Short batches beside long ones: 0 or 1."""
        self._one_device = devices == 1
        self._ends = 0.0
        self._freed = 0.0
        self._queue: SimpleQueue[_Work | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def attach(self, claim: Claim) -> None:
        """A function comes; call in the event loop."""
        self._loop = asyncio.get_running_loop()
        self.shares.add(claim)
        self.slots = max(self.slots, claim.limit.most)

    def detach(self, claim: Claim) -> None:
        """A function leaves; none of its batches is under way."""
        self.shares.remove(claim)
        self.slots = max((each.limit.most for each in self.shares), default=1)
        if not len(self.shares):
            self.stop()

    def stop(self) -> None:
        """End the threads; the next batch begins new ones."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for _ in self._threads:
            self._queue.put(None)
        self._threads = []
        self._queue = SimpleQueue()

    def kick(self) -> None:
        """Something waits: look once the loop has read what else has come."""
        if not self._kicked:
            self._kicked = True
            assert self._loop is not None
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        """Begin what is due."""
        self._kicked = False
        now = time.monotonic()
        while (work := self._next(now)) is not None:
            self._hand_over(work)
        self._wait_for(now)

    def _next(self, now: float) -> _Work | None:
        if self._again and self.running < self.slots:
            return self._again.popleft()
        among = self._eligible(now)
        while True:
            claim = self.shares.pick(now, among)
            if claim is None:
                return None
            claim.answers.overdue(now)
            batch = claim.queue.take(now)
            if batch is not None:
                return self._work(claim, batch, beside=among is not None)

    def _work(self, claim: Claim, batch: Batch, *, beside: bool = False) -> _Work:
        estimate = claim.runner.prepared[batch.bucket, batch.key].seconds
        self.shares.charge(claim, estimate)
        claim.limit.running += 1
        return _Work(claim, batch, estimate, time.monotonic_ns(), beside)

    def _eligible(self, now: float) -> list[Claim] | None:
        """Who may begin now; None: the one whose turn it is.

        Beside a batch that runs, the next one is picked early only if a batch cannot grow any more;
        then whose turn it is decides, or one that is always full would never let others in.
        """
        if not self.running:
            return None
        if self.running < self.slots and (
            self._ends - now <= self._lead() or any(claim.queue.full() for claim in self.shares)
        ):
            return None
        if self._beside or not (self.on_host and self._one_device):
            return []
        return [claim for claim in self.shares if claim.short]

    def _lead(self) -> float:
        length = self._ends - self._freed
        return _LEAD * length if length >= _LONG_SECONDS else 0.0

    def _hand_over(self, work: _Work) -> None:
        if work.beside:
            self._beside += 1
        else:
            if not self.running:
                self._freed = self._ends = time.monotonic()
            self.running += 1
            self._ends += work.estimate
        if len(self._threads) < min(self.running, self.slots) + self._beside:
            thread = threading.Thread(
                target=self._serve, args=(self._queue,), name=f"fornax-{self.name}", daemon=True
            )
            self._threads.append(thread)
            thread.start()
        self._queue.put(work)

    def _serve(self, queue: "SimpleQueue[_Work | None]") -> None:
        """A thread of the scheduler."""
        while (work := queue.get()) is not None:
            with _annotation(work.claim, work.batch):
                computed = work.claim.runner.compute(work.batch, alone=work.beside)
            assert self._loop is not None
            try:
                self._loop.call_soon_threadsafe(self._finished, work, computed)
            except RuntimeError:  # the loop was closed: nobody waits for an answer any more
                if not self._loop.is_closed():
                    raise
            del work, computed

    def _finished(self, work: _Work, computed: Computed) -> None:
        """Back in the loop: the device first, then the answers."""
        now = time.monotonic()
        took = now - work.started * 1e-9
        if work.beside:
            self._beside -= 1
        else:
            self.running -= 1
            took = min(took, now - self._freed)
            self._freed = now
            self._ends = now + (work.estimate if self.running else 0.0)
        self._account(work, computed, took)
        self._pump()
        self._deliver(work, computed)

    def _account(self, work: _Work, computed: Computed, took: float) -> None:
        work.claim.limit.running -= 1
        if computed.error is None:
            work.claim.runner.prepared[work.batch.bucket, work.batch.key].took(took)
        self.shares.charge(work.claim, took - work.estimate)

    def _deliver(self, work: _Work, computed: Computed) -> None:
        requests = work.batch.requests
        if computed.error is not None and len(requests) > 1:
            # One of them may be the cause: none may fail for a neighbour's sake.
            plan = work.claim.queue.plans[work.batch.key]
            for each in requests:
                alone = Batch([each], each.rows, plan.bucket(each.rows), work.batch.key)
                self._again.append(self._work(work.claim, alone))
            self.kick()
            return
        work.claim.answers.answer(work.batch, computed, work.started)

    def _wait_for(self, now: float) -> None:
        """Look again when a delay is over, or when what runs is about to end."""
        due = self.shares.next_due(now)
        if self.running == 1 and self._lead():
            waiting = any(claim.queue.size for claim in self.shares)
            early = self._ends - self._lead()
            if waiting and early > now:
                due = early if due is None else min(due, early)
        if due is None or self._kicked:
            return
        assert self._loop is not None
        if due - now < 1e-3:  # timers are no finer: look at every turn of the loop
            self.kick()
        elif self._timer is None or due < self._timer_due:
            if self._timer is not None:
                self._timer.cancel()
            self._timer_due = due
            self._timer = self._loop.call_later(due - now, self._woken)

    def _woken(self) -> None:
        self._timer = None
        if not self._kicked:
            self._pump()


def _annotation(claim: Claim, batch: Batch) -> AbstractContextManager[object]:
    """Shows in profiles a batch and how long its requests waited; `fornax.profile.serving` reads
    it."""
    if not TraceAnnotation.is_enabled():
        return nullcontext()
    now = time.monotonic()
    return TraceAnnotation(
        f"batch/{claim.name}",
        requests=" ".join(_name(each) for each in batch.requests),
        waited_us=" ".join(f"{1e6 * (now - each.arrived):.0f}" for each in batch.requests),
        rows=batch.rows,
        bucket=batch.bucket,
        most_rows=claim.queue.plans[batch.key].most,
    )


def _name(request: Waiting) -> str:
    """The request's id, and its number, since a client may send an id twice."""
    return f"{request.id}-{request.number}" if request.id else str(request.number)
