"""The training loop: feed, step, record, evaluate, checkpoint, go back from loss spikes, stop.

One step is in flight while the host reads the metrics of the one before, so that the devices do
not wait for the host. With several virtual devices on a CPU each step is awaited instead: steps
that wait for each other's threads can block for ever there.
"""

import math
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import jax

from fornax.checkpoint import Checkpointer
from fornax.config import DiskFullError, worker_record
from fornax.config.run_requests import Request, answer
from fornax.config.spikes import Spike
from fornax.mesh import hosts
from fornax.train.captures import Captures, Inbox
from fornax.train.config import TrainerConfig
from fornax.train.diloco.sync import SliceSync
from fornax.train.evaluate import evaluate
from fornax.train.goodput import Ledger
from fornax.train.interval import Interval
from fornax.train.memory_tier import MemoryTier
from fornax.train.recorder import Recorder
from fornax.train.rewind import LossSpikeError, SpikeGuard
from fornax.train.session import Programs, Start
from fornax.train.signals import StopSignals
from fornax.train.state import as_tree
from fornax.train.task import Samples

__all__ = ["Loop", "Reason"]

Reason = Literal["finished", "signal", "data"]


@dataclass(kw_only=True)
class Loop:
    """One attempt at a run, from `start` to the end or a request to stop."""

    config: TrainerConfig
    config_yaml: str
    programs: Programs
    start: Start
    checkpointer: Checkpointer
    recorder: Recorder
    ledger: Ledger
    signals: StopSignals
    captures: Captures
    """Profiles of steps."""
    inbox: Inbox
    """What the run is asked for while it goes."""
    guard: SpikeGuard | None = None
    """What watches for loss spikes; None: nothing does."""
    sync: SliceSync | None = None
    """What exchanges parameters with the other slices of a DiLoCo run; None: there are none."""
    memory: MemoryTier | None = None
    """Where snapshots go that outlive the process; None: nowhere."""
    interval: Interval | None = None
    """When the next checkpoint is due with `save_every: auto`; None: `save_every` says it."""

    def __post_init__(self) -> None:
        """Prepare for the first step."""
        self.state = self.start.state
        self.step = self.start.step
        self.batches = self.start.batches
        self.signal: int | None = None
        self.kept = False
        """Whether the last step is kept in memory only, and another group resumes from there."""
        self.evaluation: dict[str, float] | None = None
        self._evaluations: dict[int, dict[str, float]] = {}
        self._pending: deque[tuple[int, int, Any, dict[str, float]]] = deque()
        self._saved: int | None = self.start.step if self.start.saved else None
        self._save_due = False
        self._turns = self.start.step
        window = self.config.profile.window if self.config.profile.only else None
        self._last = self.config.steps if window is None else window[1]
        self._save_asked: list[Request] = []
        self._stop_asked: list[Request] = []
        self._begin_intervals()
        self._in_flight = 0 if _devices_share_threads() else 1

    def run(self) -> Reason:
        """Train until the last step, the end of the data, or a signal; then checkpoint."""
        self.ledger.enter("step")
        reason: Reason | None = None
        try:
            while reason is None:
                try:
                    reason = self._train()
                except LossSpikeError as found:
                    self._go_back(found.spike)
        finally:
            self.captures.close(self.step)
        self.kept = reason == "signal" and self._keeps_only()
        if self.kept:
            self._answer_stops()
            return reason
        try:
            self._save()
            with self.ledger.phase("checkpoint"):
                self.checkpointer.wait()
        except DiskFullError as error:
            raise DiskFullError(
                f"the run is at step {self.step} of {self.config.steps}, and that is not saved: "
                f"{error}. Make room and run the same command again"
            ) from error
        finally:
            self._answer_saves()
            self._answer_stops()
        return reason

    def _train(self) -> Reason:
        """Steps until one of the ends, all of them recorded.

        Raises:
          LossSpikeError: when one of them was a loss spike.
        """
        reason: Reason = "finished"
        while self.step < self._last:
            self._turns += 1  # not the step, which a rewind takes back: processes count together
            if self.signal is None:
                self.signal = self.signals.stopped_by(self._turns)
            if self.signal is None and self.sync is not None and self.sync.stop:
                self.signal = signal.SIGTERM
            self._heed()
            if self.signal is not None and not self._exchanging:
                reason = "signal"
                break
            if not self._turn():
                reason = "data"
                break
        self._drain(0)
        if self.sync is not None and self._exchanging:
            with self.ledger.phase("exchange"):
                self.state, self.step = self.sync.settle(self.step, self.state)
        return reason

    def _heed(self) -> None:
        """Take what the run is asked for."""
        for kind, steps, request in self.inbox.take(self._turns):
            if kind == "profile":
                self.captures.ask(steps, request)
            elif kind == "checkpoint":
                self._save_due = True
                self._save_asked += [] if request is None else [request]
            else:
                self.signal = signal.SIGINT  # as if by hand: nothing is to start it again
                self._stop_asked += [] if request is None else [request]

    def _turn(self) -> bool:
        """One step; False where there is no more data."""
        self.ledger.begin(self.step + 1, self.batches.upcoming)
        if self.captures.due(self.step + 1):
            self._drain(0)
            self.captures.begin(self.step + 1)
        with jax.profiler.StepTraceAnnotation("train", step_num=self.step + 1):
            with self.ledger.phase("wait_for_data"):
                rows = self._next_rows()
            if rows is None:
                return False
            self._take(rows)
        self.captures.end(self.step)
        return True

    @property
    def _exchanging(self) -> bool:
        return self.sync is not None and self.sync.in_flight

    def _next_rows(self) -> dict[str, Any] | None:
        follow, state = self.programs.parts.task.post.follow, self.state
        if follow is not None:
            follow(self.step, lambda: self.programs.model(state))
        return next(self.batches, None)

    def _take(self, rows: dict[str, Any]) -> None:
        observe = self.programs.parts.task.post.observe
        observed = {} if observe is None else dict(observe())
        self.state, metrics = self.programs.step(self.state, rows)
        self.step += 1
        observed["compilations"] = self.programs.compilations
        self._pending.append((self.step, self.batches.position - 1, metrics, observed))
        if self.sync is not None:
            observed |= self._exchange(self.sync)
        evaluates = self._due(self.config.eval.every) or (
            self.config.eval.every is not None and self.step == self.config.steps
        )
        samples = self.programs.parts.task.samples
        if samples is not None and (self._due(samples.every) or self.step == self.config.steps):
            self._show(samples)
        self._save_due = self._save_is_due() or self._save_due
        saves = self._save_due and not self._exchanging
        if evaluates:
            self._drain(1)
            jax.block_until_ready(self.state.step)
            self._evaluations[self.step] = self.evaluation = self._evaluate()
        self._drain(0 if evaluates or saves or self.captures.running else self._in_flight)
        self._unless_full(self.checkpointer.check)
        if self.guard is not None and self.guard.is_due(self.step):
            self._remember(self.guard)
        if self.memory is not None and self.memory.is_due(self.step):
            self._keep(self.memory)
        if saves:
            self._unless_full(self._save)
            self._answer_saves()

    def _exchange(self, sync: SliceSync) -> Mapping[str, float]:
        """What is due with the other slices after this step; the numbers of it."""
        if not self._in_flight:
            jax.block_until_ready(self.state.step)
        with self.ledger.phase("exchange"):
            last = self.step == self.config.steps
            self.state, step = sync.after_step(self.step, self.state, last=last)
        if step != self.step:
            self.recorder.progress.log(
                f"the other slices continued without this one after step {self.step}; it resumes "
                f"at step {step}, from the state of one of them"
            )
            self.step, self._saved = step, None
        return sync.numbers

    def _remember(self, guard: SpikeGuard) -> None:
        self._drain(0)
        with self.ledger.phase("snapshot"):
            guard.remember(self.state, self.step, self.recorder.total)
        self.ledger.flush(self.step)

    def _keep(self, memory: MemoryTier) -> None:
        self._drain(0)
        with self.ledger.phase("snapshot"):
            memory.write(self.state, self.step, self.batches.state(), self._metadata())
        self.ledger.flush(self.step)

    def _keeps_only(self) -> bool:
        """Keep the last step in memory, where a launcher asked for no more: the next group resumes
        from there. Whether it is kept; it is not where there is no room, or it is on disk."""
        record = worker_record.current()
        asked = record is not None and record.is_asked_to_keep()
        if self.memory is None or self._saved == self.step or not hosts.most(int(asked)):
            return False
        with self.ledger.phase("checkpoint"):
            self._unless_full(self.checkpointer.wait)  # of one that is under way
        with self.ledger.phase("snapshot"):
            memory, state = self.memory, self.state
            memory.write_now(state, self.step, self.batches.state(), self._metadata())
        if record is not None:
            record.set_kept(self.step)
        return True

    def _go_back(self, spike: Spike) -> None:
        """Leave the spike's batch out, and resume from the state before it."""
        assert self.guard is not None
        with self.ledger.phase("spikes"):
            self.captures.end(self.step, early=True)
            self._pending.clear()
            self._evaluations.clear()
            jax.block_until_ready(self.state.step)
            self._unless_full(self.checkpointer.wait)
            rewind = self.guard.plan(spike)
            self.recorder.progress.log(f"{spike}: {rewind}")
            self.ledger.rewind(self.step, rewind.back_to, rewind.skipped)
            del self.state  # its memory is for the one that comes
            start = self.guard.go_back(rewind)
        self.state, self.step, self.evaluation = start.state, start.step, None
        self._saved = start.step if rewind.source == "checkpoint" else None
        self.recorder.rewind(start.step, start.total)
        self._begin_intervals()

    def _begin_intervals(self) -> None:
        for tier in (self.memory, self.interval):
            if tier is not None:
                tier.begin(self.step)

    @contextmanager
    def _measured(self) -> Iterator[None]:
        """Around a save, also one for which there is no room: when the next is due."""
        if self.interval is None:
            yield
            return
        self.interval.start(self.step)
        full: DiskFullError | None = None
        try:
            yield
        except DiskFullError as error:
            full = error
        self.interval.finish(self.step, least=self.checkpointer.seconds)
        if full is not None:
            raise full

    def _save_is_due(self) -> bool:
        if self.interval is not None:
            return self.interval.is_due(self.step)
        every = self.config.save_every
        return isinstance(every, int) and self._due(every)

    def _due(self, every: int | None) -> bool:
        return every is not None and self.step % every == 0

    def _drain(self, in_flight: int) -> None:
        """Record steps, waiting for them, until no more than `in_flight` are left.

        Raises:
          LossSpikeError: when one of them was a loss spike; it is not recorded.
        """
        while len(self._pending) > in_flight:
            step, batch, metrics, observed = self._pending.popleft()
            with self.ledger.program():
                found = jax.device_get(metrics)
            numbers = {name: float(value) for name, value in found.items() if not value.ndim}
            arrays = {name: value for name, value in found.items() if value.ndim}
            numbers |= observed
            if self.guard is not None:
                self.guard.check(step, batch, numbers)
                numbers |= {"batch": batch, "rewinds": self.guard.rewinds}
            evaluation = self._evaluations.pop(step, None)
            self.recorder.step(step, numbers, time.time(), evaluation, arrays)

    def _evaluate(self) -> dict[str, float]:
        with self.ledger.phase("evaluate"):
            task = self.programs.parts.task
            batches = task.batches("eval", self.programs.hosts)
            try:
                return evaluate(
                    task, self.programs.evaluate, self.state, batches, self.config.eval.batches
                )
            finally:
                batches.close()

    def _show(self, samples: Samples[Any]) -> None:
        self._drain(1)
        jax.block_until_ready(self.state.step)
        with self.ledger.phase("evaluate"):
            samples.show(self.step, self.programs.model(self.state, averaged=True))

    def _save(self) -> None:
        self._save_due = False
        if self.config.profile.only:
            return
        with self.ledger.phase("checkpoint"):
            self._unless_full(self.checkpointer.wait)  # of the save before
        if self._saved == self.step:
            return
        outer = {} if self.sync is None else {"outer": self.sync.outer}
        with self.ledger.phase("checkpoint"), self._measured():
            self.checkpointer.save(
                self.step,
                state=as_tree(self.state) | outer,
                data=self.batches.state(),
                config_yaml=self.config_yaml,
                metadata=self._metadata(),
                metrics=self._metrics(),
            )
        self._saved = self.step
        self.ledger.flush(self.step)

    def _answer_saves(self) -> None:
        while self._save_asked:
            request = self._save_asked.pop()
            if self.config.profile.only:
                answer(request, error="this run is for a profile only, and saves nothing")
            elif self._saved == self.step:
                answer(request, result={"step": self.step})
            else:
                answer(request, error=f"step {self.step} is not saved: the disk is full")

    def _answer_stops(self) -> None:
        for request in self._stop_asked:
            answer(request, result={"step": self.step})

    def _unless_full(self, action: Callable[[], object]) -> None:
        """Resume where a checkpoint has no room: those before it are whole, and the next save tries
        again."""
        try:
            action()
        except DiskFullError as error:
            self._saved = None
            self.recorder.progress.log(f"{error}. Training continues; the next save tries again")
            record = worker_record.current()
            if record is not None:
                record.set_unsaved(self.step)

    def _metadata(self) -> dict[str, object]:
        found: dict[str, object] = {
            "total": self.recorder.total,
            "batches": self.batches.position,
            "skipped_batches": sorted(self.batches.skip.batches),
        }
        return found if self.guard is None else found | {"spikes": self.guard.window()}

    def _metrics(self) -> dict[str, float]:
        """What `checkpoint.best_metric` may name: the step's numbers, the latest evaluation's."""
        numbers = {k: v for k, v in self.recorder.numbers.items() if math.isfinite(v)}
        return numbers | {f"eval/{k}": v for k, v in (self.evaluation or {}).items()}


def _devices_share_threads() -> bool:
    return jax.default_backend() == "cpu" and jax.local_device_count() > 1
