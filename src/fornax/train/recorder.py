"""From a step's device metrics to records in every sink, with throughput and time left."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fornax.config.errors import FornaxError
from fornax.config.progress import Progression
from fornax.train.goodput import Ledger
from fornax.train.metrics import Sink

__all__ = ["Recorder"]

_FLUSH_SECONDS = 1.0
"""At most this much time of a process that is killed is not in its record."""
_ARRAYS_EVERY = 10
"""Of this many records one has the arrays, which may be long; each with an evaluation has them."""


@dataclass(kw_only=True)
class Recorder:
    """Counts, derives and writes. In all processes but the first it has no sinks."""

    sinks: Sequence[Sink]
    progress: Progression
    ledger: Ledger
    every: int
    steps: int
    unit: str
    flops_per_unit: float | None
    peak_flops: float | None
    max_skipped: int
    total: float = 0.0
    """Units seen in the whole run, resumed parts included."""
    last: dict[str, Any] | None = None
    """The latest record."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """The latest step's metrics."""
    _skipped_in_a_row: int = 0
    _units: float = 0.0
    _busy_at: float = 0.0
    _steps: int = 0
    _per_step: float = 0.0

    def step(
        self,
        step: int,
        metrics: Mapping[str, float],
        time: float,
        evaluation: Mapping[str, float] | None = None,
        arrays: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        """Take one finished step.

        Args:
          step: which.
          metrics: its numbers.
          time: when it was finished, seconds since 1970.
          evaluation: what an evaluation after it found.
          arrays: what it counted; recorded as nested lists, now and then.

        Raises:
          FornaxError: when too many steps in a row were skipped, or a sink cannot write.
        """
        self.numbers = dict(metrics)
        weight = metrics["weight"]
        self.total += weight
        self._units += weight
        self._steps += 1
        record = self._record(step, metrics, time)
        logged = evaluation is not None or step % self.every == 0 or step == self.steps
        if logged:
            record |= self._throughput()
        record |= {f"eval/{name}": value for name, value in (evaluation or {}).items()}
        now = step % (_ARRAYS_EVERY * self.every) == 0 or step == self.steps
        if now or evaluation is not None:
            record |= {name: array.tolist() for name, array in (arrays or {}).items()}
        if logged:
            self.last = record
            for sink in self.sinks:
                sink.write(record)
        self.ledger.flush(step, after=0.0 if logged else _FLUSH_SECONDS)
        self.progress.update({**(self.last or {}), **record}, self._seconds_left(step))
        self._count_skips(step, metrics)

    def rewind(self, step: int, total: float) -> None:
        """The run resumes after `step`, with `total` units seen."""
        for sink in self.sinks:
            sink.rewind(step)
        self.total, self.numbers, self.last = total, {}, None
        self._skipped_in_a_row = 0
        self._units, self._steps, self._busy_at = 0.0, 0, self._busy()

    def _busy(self) -> float:
        totals = self.ledger.totals()
        return totals["step"] + totals["wait_for_data"]

    def _record(self, step: int, metrics: Mapping[str, float], time: float) -> dict[str, object]:
        rest = {k: v for k, v in metrics.items() if k not in ("loss", "weight", "skipped")}
        return {
            "step": step,
            "loss": metrics["loss"],
            **rest,
            "skipped": bool(metrics["skipped"]),
            self.unit: _whole(self.total),
            "time": round(time, 3),
        }

    def _count_skips(self, step: int, metrics: Mapping[str, float]) -> None:
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if metrics["skipped"] else 0
        if self._skipped_in_a_row < self.max_skipped:
            return
        raise FornaxError(
            f"step {step}: {self._skipped_in_a_row} updates in a row were skipped (loss "
            f"{metrics['loss']:.4g}, gradient norm {metrics['grad_norm']:.4g}); the run does not "
            "recover. Lower optim.learning_rate, clip, look at the data around this step, or raise "
            "skip.outlier_factor"
        )

    def _throughput(self) -> dict[str, float]:
        """Over the interval since the last logged step, evaluation and checkpoints left out."""
        busy = self._busy()
        spent = busy - self._busy_at
        if spent <= 0:
            return {}
        rate, per_step = self._units / spent, spent / self._steps
        found = {f"{self.unit}_per_second": rate, "step_seconds": per_step}
        if self.flops_per_unit and self.peak_flops:
            found["mfu"] = rate * self.flops_per_unit / self.peak_flops
        self._busy_at, self._units, self._steps = busy, 0.0, 0
        self._per_step = 0.9 * self._per_step + 0.1 * per_step if self._per_step else per_step
        return found

    def _seconds_left(self, step: int) -> float | None:
        return (self.steps - step) * self._per_step if self._per_step else None


def _whole(value: float) -> int | float:
    return int(value) if float(value).is_integer() else value
