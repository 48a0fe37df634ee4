"""Loss spikes: how one is distinguished from noise, and what the guard may do about it.

A value is compared with the median of those before it in a window, in units of their spread: the
median absolute deviation times 1.4826, which is the standard deviation where values are normal.
Both stay where they were when a few values in the window are far out (Rousseeuw and Croux 1993,
"Alternatives to the median absolute deviation").
"""

import math
import statistics
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from fornax.config.errors import ConfigError

__all__ = [
    "DrillConfig",
    "Spike",
    "SpikeConfig",
    "SpikeDetector",
    "SpikeLimit",
    "refuse_rewinds",
]

_NORMAL = 1.4826
"""Standard deviations in a median absolute deviation of normal values."""


@dataclass(frozen=True, kw_only=True)
class SpikeLimit:
    """How far above the median a value is a spike: beyond both numbers."""

    deviations: float
    """Above the median by this many deviations: medians of the absolute deviation x 1.4826."""
    rise: float
    """Above the median by this share of it: 0.1 is a tenth higher, 4 is five times as high."""

    def __post_init__(self) -> None:
        """Check the numbers."""
        if self.deviations <= 0 or self.rise <= 0:
            raise ConfigError(
                f"deviations={self.deviations}, rise={self.rise}: both must be above 0; null in "
                "place of the section switches the limit off"
            )


@dataclass(frozen=True, kw_only=True)
class DrillConfig:
    """Batches spoiled on purpose, by number from 0, to see a run go back and leave them out."""

    nan: tuple[int, ...] = ()
    """Batches of which a weight is not a number."""
    noise: tuple[int, ...] = ()
    """Batches whose `targets` are drawn at random between their smallest and their largest."""

    def __post_init__(self) -> None:
        """Check the numbers."""
        if min((*self.nan, *self.noise), default=0) < 0:
            raise ConfigError("the batches of a drill are counted from 0; none is negative")


@dataclass(frozen=True, kw_only=True)
class SpikeConfig:
    """When a step is a loss spike, and how the run goes back to before it.

    A loss or gradient norm that is not finite is one at once, from the first step on.
    """

    loss: SpikeLimit | None = field(default_factory=lambda: SpikeLimit(deviations=6.0, rise=0.1))
    """Limit of the loss; null looks only at whether it is finite."""
    grad_norm: SpikeLimit | None = field(
        default_factory=lambda: SpikeLimit(deviations=16.0, rise=4.0)
    )
    """Limit of the gradient norm before clipping; null looks only at whether it is finite."""
    window: int = 128
    """Good steps before this one that it is compared with; from a quarter of them on."""
    warmup: int = 100
    """First steps of the run that are neither compared nor compared with."""
    skip_before: int = 0
    """Batches left out besides that of the spike, from right before it."""
    skip_after: int = 0
    """Batches left out besides that of the spike, from right after it."""
    max_rewinds: int = 5
    """How often the run may go back `within` this many steps; then it stops with an error."""
    within: int = 1000
    """Steps in which rewinds are counted."""
    snapshot_every: int | None = 50
    """Steps between two copies of the state in the hosts' memory, to go back to; null goes back to
    checkpoints only."""
    snapshots: int = 2
    """Newest copies kept in memory. One alone is too new for a spike right after it was made."""
    drill: DrillConfig = field(default_factory=DrillConfig)
    """Spikes made on purpose."""

    def __post_init__(self) -> None:
        """Check the numbers."""
        least = {"window": 8, "warmup": 0, "skip_before": 0, "skip_after": 0, "max_rewinds": 0}
        least |= {"within": 1, "snapshots": 1, "snapshot_every": 1}
        for name, bound in least.items():
            value = getattr(self, name)
            if value is not None and value < bound:
                raise ConfigError(f"{name}={value} must be {bound} or more")


def refuse_rewinds(config: SpikeConfig | None, method: str) -> None:
    """Refuse to watch for loss spikes where no batch can be replayed.

    Raises:
      ConfigError: when `config` is given; `method` names what draws its own batches.
    """
    if config is not None:
        raise ConfigError(
            f"spikes is set, and {method} draws its batches from the model while it trains, so "
            "that none could be replayed after a rewind; remove spikes, and use "
            "skip.outlier_factor to leave single updates out"
        )


@dataclass(frozen=True, kw_only=True)
class Spike:
    """A step that is one."""

    step: int
    batch: int
    """Number of the batch that it was computed on, from 0."""
    metric: str
    """`loss` or `grad_norm`."""
    value: float
    median: float | None
    """Of the window; None where `value` is not finite."""
    limit: float | None
    """What `value` is above; None where it is not finite."""

    def __str__(self) -> str:
        """In words."""
        what = f"{'loss' if self.metric == 'loss' else 'gradient norm'} {self.value:.4g}"
        where = f"step {self.step} (batch {self.batch}): {what}"
        if self.median is None or self.limit is None:
            return f"{where} is not finite"
        return f"{where} is a spike (median {self.median:.4g}, limit {self.limit:.4g})"


class SpikeDetector:
    """Judges the steps of a run in order, and remembers those that were good."""

    def __init__(self, config: SpikeConfig) -> None:
        """A detector that has seen nothing."""
        self._config = config
        self._windows = {"loss": _Window(config.window), "grad_norm": _Window(config.window)}

    def judge(self, step: int, batch: int, metrics: Mapping[str, float]) -> Spike | None:
        """The spike that this step is, or None, and then it is remembered.

        Args:
          step: its number, from 1.
          batch: the number of its batch.
          metrics: with `loss`, `grad_norm`, and `skipped`: a step whose update was left out for
            another reason is not remembered.
        """
        limits = {"loss": self._config.loss, "grad_norm": self._config.grad_norm}
        for name in limits:
            if not math.isfinite(value := metrics[name]):
                return Spike(
                    step=step, batch=batch, metric=name, value=value, median=None, limit=None
                )
        if step <= self._config.warmup:
            return None
        for name, limit in limits.items():
            found = None if limit is None else self._windows[name].above(metrics[name], limit)
            if found is not None:
                median, bound = found
                return Spike(
                    step=step,
                    batch=batch,
                    metric=name,
                    value=metrics[name],
                    median=median,
                    limit=bound,
                )
        if not metrics["skipped"]:
            for name, window in self._windows.items():
                window.add(metrics[name])
        return None

    def state(self) -> dict[str, list[float]]:
        """What is remembered, JSON-able."""
        return {name: list(window.recent) for name, window in self._windows.items()}

    def restore(self, state: Mapping[str, Sequence[float]]) -> None:
        """Remember what `state` gave; nothing for an empty one."""
        for name in self._windows:
            self._windows[name] = _Window(self._config.window, state.get(name, ()))


class _Window:
    """The latest values of one metric, in order of time and of size."""

    def __init__(self, size: int, values: Iterable[float] = ()) -> None:
        self._size = size
        self.recent = deque(values, maxlen=size)
        self._sorted = sorted(self.recent)

    def add(self, value: float) -> None:
        if len(self.recent) == self._size:
            del self._sorted[bisect_left(self._sorted, self.recent[0])]
        self.recent.append(value)
        insort(self._sorted, value)

    def above(self, value: float, limit: SpikeLimit) -> tuple[float, float] | None:
        """The median and the bound where the value is above it; None where it is not.

        The deviation is only looked for where the value has risen enough.
        """
        if len(self.recent) * 4 < self._size:
            return None
        median = statistics.median(self._sorted)
        least = median + limit.rise * abs(median)
        if value <= least:
            return None
        deviation = _NORMAL * statistics.median(abs(x - median) for x in self._sorted)
        bound = max(least, median + limit.deviations * deviation)
        return (median, bound) if value > bound else None
