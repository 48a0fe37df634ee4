"""The training loop: feed, step, record, evaluate, checkpoint, stop.

One step is in flight while the host reads the metrics of the one before, so that the devices do
not wait for the host. With several virtual devices on a CPU each step is awaited instead: steps
that wait for each other's threads can block for ever there.
"""

import math
import time
from collections import deque
from dataclasses import dataclass
from typing import Any, Literal

import jax

from fornax.checkpoint import Checkpointer
from fornax.train.config import TrainerConfig
from fornax.train.evaluate import evaluate
from fornax.train.goodput import Ledger
from fornax.train.recorder import Recorder
from fornax.train.run_dir import RunDirectory
from fornax.train.session import Programs, Start
from fornax.train.signals import StopSignals
from fornax.train.state import as_tree

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
    directory: RunDirectory

    def __post_init__(self) -> None:
        """Stand before the first step."""
        self.state = self.start.state
        self.step = self.start.step
        self.batches = self.start.batches
        self.signal: int | None = None
        self.evaluation: dict[str, float] | None = None
        self._evaluations: dict[int, dict[str, float]] = {}
        self._pending: deque[tuple[int, Any, dict[str, float]]] = deque()
        self._saved = self.start.step
        self._profiling = False
        self._in_flight = 0 if _devices_share_threads() else 1

    def run(self) -> Reason:
        """Train until the last step, the end of the data, or a signal; then checkpoint."""
        self.ledger.enter("step")
        reason: Reason = "finished"
        while self.step < self.config.steps:
            self.signal = self.signals.stopped_by(self.step)
            if self.signal is not None:
                reason = "signal"
                break
            with self.ledger.phase("wait_for_data"):
                rows = self._next_rows()
            if rows is None:
                reason = "data"
                break
            self._take(rows)
        self._drain(0)
        self._stop_profile()
        self._save()
        with self.ledger.phase("checkpoint"):
            self.checkpointer.wait()
        return reason

    def _next_rows(self) -> dict[str, Any] | None:
        follow, state = self.programs.parts.task.follow, self.state
        if follow is not None:
            follow(self.step, lambda: self.programs.model(state))
        return next(self.batches, None)

    def _take(self, rows: dict[str, Any]) -> None:
        self._start_profile()
        observe = self.programs.parts.task.observe
        observed = {} if observe is None else dict(observe())
        self.state, metrics = self.programs.step(self.state, rows)
        self.step += 1
        observed["compilations"] = self.programs.compilations
        self._pending.append((self.step, metrics, observed))
        evaluates = self._due(self.config.eval.every) or (
            self.config.eval.every is not None and self.step == self.config.steps
        )
        saves = self._due(self.config.save_every)
        if evaluates:
            self._drain(1)
            jax.block_until_ready(self.state.step)
            self._evaluations[self.step] = self.evaluation = self._evaluate()
        self._drain(0 if evaluates or saves or self._profiling else self._in_flight)
        self.checkpointer.check()
        if saves:
            self._save()
        if self._profiling and self.step == self.config.profile_steps[1]:
            self._stop_profile()

    def _due(self, every: int | None) -> bool:
        return every is not None and self.step % every == 0

    def _drain(self, in_flight: int) -> None:
        """Record steps, waiting for them, until no more than `in_flight` are left."""
        while len(self._pending) > in_flight:
            step, metrics, observed = self._pending.popleft()
            numbers = {name: float(value) for name, value in jax.device_get(metrics).items()}
            numbers |= observed
            evaluation = self._evaluations.pop(step, None)
            self.recorder.step(step, numbers, time.time(), evaluation)

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

    def _save(self) -> None:
        if self._saved == self.step:
            return
        with self.ledger.phase("checkpoint"):
            self.checkpointer.save(
                self.step,
                state=as_tree(self.state),
                data=self.batches.state(),
                config_yaml=self.config_yaml,
                metadata={"total": self.recorder.total},
                metrics=self._metrics(),
            )
        self._saved = self.step

    def _metrics(self) -> dict[str, float]:
        """What `checkpoint.best_metric` may name: the step's numbers, the latest evaluation's."""
        numbers = {k: v for k, v in self.recorder.numbers.items() if math.isfinite(v)}
        return numbers | {f"eval/{k}": v for k, v in (self.evaluation or {}).items()}

    def _start_profile(self) -> None:
        if self.config.profile_steps and self.step + 1 == self.config.profile_steps[0]:
            self._drain(0)
            jax.profiler.start_trace(str(self.directory.profile))
            self._profiling = True

    def _stop_profile(self) -> None:
        if self._profiling:
            jax.profiler.stop_trace()
            self._profiling = False


def _devices_share_threads() -> bool:
    return jax.default_backend() == "cpu" and jax.local_device_count() > 1
