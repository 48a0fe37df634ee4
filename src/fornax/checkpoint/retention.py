"""Which checkpoints stay: Orbax's preservation policies, chosen by config."""

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fornax.config.errors import ConfigError

__all__ = ["CheckpointConfig", "Kept", "expired"]


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Retention and verification; a checkpoint stays while any of the keep rules keeps it."""

    keep_last: int = 3
    """Newest checkpoints to keep; at least 1."""
    keep_every_steps: int | None = None
    """Keep each checkpoint whose step is a multiple of this, for good."""
    keep_every_minutes: float | None = None
    """Keep, for good, one checkpoint an interval of this length."""
    keep_best: int = 0
    """Best checkpoints to keep, by `best_metric`."""
    best_metric: str | None = None
    """Name of the metric, among those given to `save`, that says which are best."""
    best_mode: Literal["min", "max"] = "min"
    """Whether a small or a large metric is good."""
    verify: Literal["checksum", "size"] = "checksum"
    """What `restore` checks of each file first: CRC-32 of its bytes (reads all of them once), or
    its size only."""
    timeout_seconds: int = 1200
    """How long the background part of a save may take, all processes together."""
    mirror: str | None = None
    """An address such as gs://bucket/run or s3://bucket/run to which each complete step is copied,
    and from which the run resumes where its directory has no newer step."""

    mtbf_hours: float | None = None
    """Mean hours between failures of the whole run, for `save_every: auto`; null takes what
    `fornax launch` has measured, starting from its `--mtbf`, and 24 without it."""

    def __post_init__(self) -> None:
        if self.keep_last < 1:
            raise ConfigError(
                f"keep_last={self.keep_last} would leave nothing to resume from; use 1 or more"
            )
        for name in ("keep_every_steps", "keep_every_minutes", "timeout_seconds", "mtbf_hours"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"{name}={value} must be greater than 0")
        if self.keep_best < 0:
            raise ConfigError(f"keep_best={self.keep_best} is negative; use 0 to switch it off")
        if self.mirror is not None and "://" not in self.mirror:
            raise ConfigError(
                f"mirror={self.mirror} is not an address; write gs://bucket/folder, s3://… or null"
            )
        if (self.keep_best > 0) != (self.best_metric is not None):
            raise ConfigError(
                f"keep_best={self.keep_best} and best_metric={self.best_metric!r} work only "
                "together; set both or neither"
            )


@dataclass
class Kept:
    """A checkpoint as the policies see it."""

    step: int
    time: datetime.datetime
    metrics: dict[str, Any] | None


def expired(config: CheckpointConfig, checkpoints: Sequence[Kept]) -> list[int]:
    """Steps that no rule keeps. `checkpoints` ascend by step."""
    from orbax.checkpoint import v1 as ocp

    policies = ocp.training.preservation_policies
    chosen: list = [policies.LatestN(config.keep_last)]
    if config.keep_every_steps is not None:
        chosen.append(policies.EveryNSteps(config.keep_every_steps))
    if config.keep_every_minutes is not None:
        chosen.append(policies.EveryNSeconds(max(1, round(config.keep_every_minutes * 60))))
    verdicts = policies.AnyPreservationPolicy(chosen).should_preserve(
        checkpoints, context=policies.PreservationContext()
    )
    best = _best(config, checkpoints)
    return [
        kept.step
        for kept, stays in zip(checkpoints, verdicts, strict=True)
        if not stays and kept.step not in best
    ]


def _best(config: CheckpointConfig, checkpoints: Sequence[Kept]) -> set[int]:
    """Orbax's BestN keeps whatever has no metric; here a checkpoint must have earned its place."""
    if config.best_metric is None:
        return set()
    sign = 1 if config.best_mode == "min" else -1
    scored = [
        (sign * kept.metrics[config.best_metric], -kept.step)
        for kept in checkpoints
        if kept.metrics and kept.metrics.get(config.best_metric) is not None
    ]
    return {-step for _, step in sorted(scored)[: config.keep_best]}
