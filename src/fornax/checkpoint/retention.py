"""Which checkpoints stay: Orbax's preservation policies, chosen by config."""

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fornax.checkpoint.config import CheckpointConfig

__all__ = ["Kept", "expired"]


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
