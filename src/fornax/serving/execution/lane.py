"""A lane: one device, or the devices of one mesh, and the batches on their way through it.

Batches are picked in the event loop. A batch whose measured time is short, and was never long
lately, is computed right there: a hop to a thread and back costs 45 us, and more where cores are
scarce. A longer one goes to one of the lane's threads, where one batch is assembled, sent and
unpacked while another computes, and the loop reads requests meanwhile; it is picked late, when the
device is about to be free or the batch could not grow any more. While requests come one at a time
there is nothing to read, so the loop computes longer ones too.

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

from fornax.serving.batching import Batch, Share, Shares
from fornax.serving.execution.awake import Awake
from fornax.serving.execution.runner import Computed, Prepared, Runner
from fornax.serving.execution.turns import Turns

__all__ = ["IN_LOOP_SECONDS", "Claim", "Lane"]

IN_LOOP_SECONDS = 300e-6
"""A batch that takes no longer is computed in the event loop."""
ALONE_SECONDS = 500e-6
"""The same for requests that come one at a time."""
_WORST_SECONDS = 5e-3
"""A program that took longer lately, if only once, is left to the threads: health checks and other
models wait for what the loop computes."""
_TURN_SECONDS = 500e-6
"""Computing in the loop goes on for so long before sockets are looked at again."""
_LONG_SECONDS = 10e-3
"""For batches of at least this time the next one is picked before they end."""
_LEAD = 0.1
"""How long before, as a part of their time."""
_MESHES = Turns()


class Answers(Protocol):
    """Whoever gets what was computed."""

    def overdue(self, now: float) -> None: ...

    def answer(self, batch: Batch, computed: Computed, started: int) -> None: ...


@dataclasses.dataclass(slots=True, eq=False, kw_only=True)
class Claim(Share):
    """One function's claim on one lane, with what computes its batches."""

    runner: Runner
    answers: Answers
    short: bool = False
    """Every bucket of it is computed in the loop."""


@dataclasses.dataclass(slots=True, eq=False)
class _Work:
    claim: Claim
    batch: Batch
    estimate: float
    started: int


class Lane:
    """See the module."""

    def __init__(self, name: str, *, on_host: bool, devices: int = 1, awake_seconds: float = 0.0):
        """A lane over so many devices; `on_host`: CPU devices; `awake_seconds`: see `Awake`."""
        self.name = name
        self.on_host = on_host
        self.lock: AbstractContextManager = (
            _MESHES if devices > 1 else Turns() if on_host else nullcontext()
        )
        self.in_loop = devices == 1
        self.shares: Shares[Claim] = Shares()
        self.running = 0
        """Batches in its threads."""
        self.slots = 1
        """Batches that may be in its threads at once: the most that a model here may have."""
        self._again: deque[_Work] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = 0.0
        self._kicked = False
        self._crowded = False
        """Several requests came at once the last time."""
        self._awake = Awake(awake_seconds, lambda: self.running > 0)
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

    def compute_now(self, claim: Claim, batch: Batch) -> bool:
        """Compute a batch that need not wait for others, before this returns; False: it must.

        It must where something runs or is about to, or where the batch is a long one.
        """
        prepared = claim.runner.prepared[batch.bucket, batch.key]
        if self._kicked or self.running or not self._may_block(prepared, ALONE_SECONDS):
            return False
        self._crowded = False
        self._compute_here(self._work(claim, batch))
        return True

    def _pump(self) -> None:
        """Begin what is due."""
        self._kicked = False
        began = now = time.monotonic()
        while True:
            work = self._next(now)
            if work is None:
                break
            if self._computes_here(work):
                self._compute_here(work)
                now = time.monotonic()
                if now - began > _TURN_SECONDS:
                    self.kick()
                    return
            else:
                self._hand_over(work)
        self._wait_for(now)

    def _next(self, now: float) -> _Work | None:
        if self._again and self.running < self.slots:
            return self._again.popleft()
        while True:
            claim = self.shares.pick(now, self._eligible(now))
            if claim is None:
                return None
            claim.answers.overdue(now)
            batch = claim.queue.take(now)
            if batch is not None:
                return self._work(claim, batch)

    def _work(self, claim: Claim, batch: Batch) -> _Work:
        estimate = claim.runner.prepared[batch.bucket, batch.key].seconds
        self.shares.charge(claim, estimate)
        claim.limit.running += 1
        return _Work(claim, batch, estimate, time.monotonic_ns())

    def _eligible(self, now: float) -> list[Claim] | None:
        """Who may begin now; None: whoever's turn it is.

        Beside a batch that runs, the next one is picked early only if a batch cannot grow any more;
        then whose turn it is decides, or one that is always full would never let others in.
        """
        if not self.running:
            return None
        if self.running < self.slots and (
            self._ends - now <= self._lead() or any(claim.queue.full() for claim in self.shares)
        ):
            return None
        return [claim for claim in self.shares if claim.short and self.on_host]

    def _lead(self) -> float:
        length = self._ends - self._freed
        return _LEAD * length if length >= _LONG_SECONDS else 0.0

    def _computes_here(self, work: _Work) -> bool:
        crowded, self._crowded = self._crowded, len(work.batch.requests) > 1 or self.running > 0
        longest = IN_LOOP_SECONDS if crowded or self._crowded else ALONE_SECONDS
        prepared = work.claim.runner.prepared[work.batch.bucket, work.batch.key]
        return self._may_block(prepared, longest) and (self.on_host or not self.running)

    def _may_block(self, prepared: Prepared, longest: float) -> bool:
        """Whether the loop may compute a program: a short one that is never long."""
        return self.in_loop and prepared.seconds <= longest and prepared.worst <= _WORST_SECONDS

    def _compute_here(self, work: _Work) -> None:
        computed = work.claim.runner.compute(work.batch, alone=True)
        self._account(work, computed, (time.monotonic_ns() - work.started) * 1e-9)
        self._deliver(work, computed)
        if not self._crowded and self._loop is not None:
            self._awake.stay(self._loop)

    def _hand_over(self, work: _Work) -> None:
        now = time.monotonic()
        if not self.running:
            self._freed = self._ends = now
        self.running += 1
        self._ends += work.estimate
        if len(self._threads) < min(self.running, self.slots):
            thread = threading.Thread(
                target=self._serve, args=(self._queue,), name=f"fornax-{self.name}", daemon=True
            )
            self._threads.append(thread)
            thread.start()
        self._queue.put(work)

    def _serve(self, queue: SimpleQueue) -> None:
        """A thread of the lane."""
        while (work := queue.get()) is not None:
            computed = work.claim.runner.compute(work.batch)
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
        self.running -= 1
        took = now - max(self._freed, work.started * 1e-9)
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
