"""What a run's numbers warn of, each with the step and what to do about it."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from fornax.config.spikes import SpikeConfig, SpikeDetector
from fornax.dashboard.series import Table

__all__ = ["Alert", "SpikeWatch", "of_disk", "of_events", "of_metrics", "of_silence"]

AlertKind = Literal["nan", "spike", "stall", "reward", "disk", "fault"]

_FINITE = ("loss", "grad_norm", "eval/loss", "reward", "kl", "entropy", "value_loss")
"""Metrics that a null of is a value that was not finite; others may be null for want of a value."""
_ALIKE_SHARE, _ALIKE_ROUNDS = 0.9, 5
_MOST_SPIKES, _MOST_JUDGED = 3, 5000
_LEAST_SILENCE, _INTERVALS = 60.0, 10.0
_DISK_SHARE, _DISK_BYTES = 0.05, 20 << 30


@dataclass(frozen=True, kw_only=True)
class Alert:
    """A warning."""

    kind: AlertKind
    level: Literal["warning", "error"]
    message: str
    """What happened."""
    fix: str
    """What to do."""
    step: int | None = None
    time: float | None = None
    metric: str | None = None


class SpikeWatch:
    """Looks for loss spikes as the trainer's own guard does, with its limits, in the steps that
    were logged."""

    def __init__(self) -> None:
        """Nothing seen yet."""
        self._detector = SpikeDetector(SpikeConfig())
        self._seen = 0
        self.found: list[Alert] = []
        """The last few."""
        self.count = 0

    def state(self) -> dict[str, Any]:
        """What is remembered, as JSON takes it."""
        return {
            "seen": self._seen,
            "count": self.count,
            "found": [asdict(alert) for alert in self.found],
            "windows": self._detector.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Remember what `state` gave."""
        self._seen, self.count = state["seen"], state["count"]
        self.found = [Alert(**alert) for alert in state["found"]]
        self._detector.restore(state["windows"])

    def look(self, table: Table) -> None:
        """Judge the records since the last call, of many the last 5000."""
        losses, steps = table.values("loss"), table.x("loss", "step")
        norms = table.values("grad_norm")
        both = len(norms) == len(losses)
        if len(losses) - self._seen > _MOST_JUDGED:
            self._detector, self._seen = SpikeDetector(SpikeConfig()), len(losses) - _MOST_JUDGED
        for place in range(self._seen, len(losses)):
            loss, step = float(losses[place]), float(steps[place])
            norm = float(norms[place]) if both else 1.0
            if not (math.isfinite(loss) and math.isfinite(step) and math.isfinite(norm)):
                continue
            values = {"loss": loss, "grad_norm": norm, "skipped": 0.0}
            spike = self._detector.judge(int(step), int(step), values)
            if spike is not None:
                self.count += 1
                what = "loss" if spike.metric == "loss" else "gradient norm"
                alert = Alert(
                    kind="spike",
                    level="warning",
                    step=spike.step,
                    metric=spike.metric,
                    message=f"the {what} jumped to {spike.value:.4g} at step {spike.step}, where "
                    f"{spike.median or 0:.4g} was usual",
                    fix="look at the data around that step; lower optim.learning_rate or clip "
                    "harder, or set spikes so that the run goes back by itself",
                )
                self.found = [*self.found, alert][-_MOST_SPIKES:]
        self._seen = len(losses)


def of_metrics(table: Table, spikes: SpikeWatch) -> list[Alert]:
    """Of what was logged; `spikes` has looked at it."""
    return [*_not_finite(table), *spikes.found, *_rewards_alike(table)]


def _not_finite(table: Table) -> Iterator[Alert]:
    for name in _FINITE:
        values = table.values(name)
        missing = np.flatnonzero(np.isnan(values))
        if not len(missing):
            continue
        steps = table.x(name, "step")
        first, last = (_step(steps[place]) for place in (missing[0], missing[-1]))
        once = len(missing) == 1
        still = missing[-1] == len(values) - 1
        where = f"at step {first}" if once else f"{len(missing)} times from step {first} to {last}"
        yield Alert(
            kind="nan",
            level="error" if still else "warning",
            step=first,
            metric=name,
            message=f"{name} was not a finite number {where}",
            fix="go back to a checkpoint before it; lower optim.learning_rate, clip, or look at "
            "the batch of that step. skip.max_consecutive ends a run that stays there",
        )


def _step(value: float) -> int | None:
    return int(value) if math.isfinite(value) else None


def _rewards_alike(table: Table) -> Iterator[Alert]:
    """Groups all of whose completions have one reward teach nothing."""
    share, spread = table.values("zero_variance_groups"), table.values("reward_std")
    if len(share) >= _ALIKE_ROUNDS:
        recent, name = share[-_ALIKE_ROUNDS:], "zero_variance_groups"
        alike = bool((recent >= _ALIKE_SHARE).all())
        said = f"{recent.mean():.0%} of the groups had one reward for all their completions"
    elif len(spread) >= _ALIKE_ROUNDS:
        recent, name = spread[-_ALIKE_ROUNDS:], "reward_std"
        alike = bool((recent < 1e-6).all())
        said = "rewards did not differ"
    else:
        return
    if alike:
        yield Alert(
            kind="reward",
            level="warning",
            step=_step(table.x(name, "step")[-1]),
            metric=name,
            message=f"{said} in the last {_ALIKE_ROUNDS} logged steps, so that nothing is learned",
            fix="take prompts that are neither always nor never solved, raise "
            "rollout.temperature or group_size, or look whether the reward works at all",
        )


def of_silence(updated: float, times: np.ndarray, now: float, step: int | None) -> Alert | None:
    """Of a run that runs and has long said nothing: of ten of its usual intervals.

    Args:
      updated: when a file of it changed last.
      times: of its last records, seconds since 1970.
      now: seconds since 1970.
      step: its last.
    """
    usual = float(np.median(np.diff(times))) if len(times) > 2 else 0.0
    silence = now - updated
    if silence < max(_LEAST_SILENCE, _INTERVALS * usual):
        return None
    return Alert(
        kind="stall",
        level="warning",
        step=step,
        time=updated,
        message=f"it runs, and has logged nothing for {silence / 60:.0f} min"
        + (f", where {usual:.1f} s are usual" if usual else ""),
        fix="look whether it compiles, waits for data or hangs: its terminal, fornax launch "
        "status, or a profile of it",
    )


def of_disk(free: int, total: int, checkpoint: int) -> Alert | None:
    """Of a disk that is nearly full: less than a twentieth and 20 GB, or two checkpoints."""
    scarce = free < _DISK_SHARE * total and free < _DISK_BYTES
    if not scarce and free >= 2 * checkpoint:
        return None
    return Alert(
        kind="disk",
        level="error" if free < max(checkpoint, 1 << 30) else "warning",
        message=f"{free / 1e9:.1f} GB are free on the disk of the runs"
        + (f", and a checkpoint takes {checkpoint / 1e9:.1f} GB" if checkpoint else ""),
        fix="make room, or lower checkpoint.keep_last; a run whose disk is full keeps its "
        "last checkpoint and stops",
    )


def of_events(events: Sequence[Mapping[str, Any]]) -> list[Alert]:
    """The last fault of a launched run, and what ended it."""
    found = []
    for event in events[::-1]:
        if event.get("state") == "teardown":
            found.append(_fault(event, "warning"))
            break
    last = next((e for e in events[::-1] if "state" in e), {})
    if last.get("state") == "ended" and last.get("code") not in (0, None, 130, 143):
        found.append(_fault(last, "error"))
    return found


def _fault(event: Mapping[str, Any], level: Literal["warning", "error"]) -> Alert:
    time = event.get("time")
    return Alert(
        kind="fault",
        level=level,
        time=float(time) if isinstance(time, float | int) else None,
        message=str(event.get("why", "a fault"))[:500],
        fix="fornax launch events says what happened; logs of ranks are in cluster/",
    )
