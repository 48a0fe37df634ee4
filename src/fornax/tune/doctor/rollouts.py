"""A few rollouts of a small run, through its own stream, sampler and rewards, at a standstill.

Legend: R rows, T tokens of a row.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from fornax.train.task import Hosts, Task
from fornax.tune.config import TuneConfig
from fornax.tune.doctor.patient import Patient, Rows
from fornax.tune.policy import Origin
from fornax.tune.rl.collect import Closable, Collector
from fornax.tune.rl.config import GRPOConfig, PPOConfig, RLConfig
from fornax.tune.rl.parts import make_parts
from fornax.tune.rl.rollouts import Collected
from fornax.tune.rl.sources import OnPolicy
from fornax.tune.rl.stream import RolloutStream
from fornax.tune.rl.task import Parts
from fornax.tune.rollout import Sampler
from fornax.tune.tasks.grpo import grpo_task
from fornax.tune.tasks.ppo import ppo_task

__all__ = ["Drawn", "Rollouts", "padded", "task_of", "with_old"]

_SHORT = 16

MakeParts = Callable[[RLConfig, Origin, Path], Parts]


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A round: what was collected, and the rows of all its optimizer steps."""

    collected: Collected
    steps: list[Rows]
    numbers: dict[str, float]
    """What the stream says of it."""


def task_of(config: RLConfig, parts: Parts) -> Task:
    """The task of either family."""
    if isinstance(config, PPOConfig):
        return ppo_task(config, parts)
    assert isinstance(config, GRPOConfig)
    return grpo_task(config, parts)


@dataclass(kw_only=True)
class Rollouts:
    """Rounds drawn with the weights of the first state; one sampler and one pool serve all."""

    patient: Patient
    make_parts: MakeParts = make_parts
    _samplers: list[Sampler] = field(default_factory=list)
    _plain: dict[float, Drawn] = field(default_factory=dict)
    _tasks: dict[float, Task] = field(default_factory=dict)

    @property
    def config(self) -> RLConfig:
        """Of the small run."""
        assert isinstance(self.patient.config, RLConfig)
        return self.patient.config

    @functools.cached_property
    def parts(self) -> Parts:
        """What the small run works with."""
        made = self.make_parts(self.config, self.patient.origin, self.patient.folder)

        def sampler(model: Any) -> Sampler:
            if not self._samplers:
                self._samplers.append(made.sampler(model))
            return self._samplers[0]

        return replace(made, sampler=sampler, prompts=made.prompts[: self.config.prompts])

    def task(self, config: TuneConfig, origin: Origin, out: Path) -> Task:
        """The small run's task, for the patient."""
        del origin, out
        assert isinstance(config, RLConfig)
        return task_of(config, self.parts)

    @functools.cached_property
    def rounds(self) -> list[Drawn]:
        """The first two rounds, at the run's temperature, filters and lengths."""
        return self._draw(self.patient.task, 2)

    @functools.cached_property
    def again(self) -> Collected:
        """The beginnings of the first round's completions, drawn once more."""
        return self._draw(task_of(self._short(), self.parts), 1)[0].collected

    def plain(self, temperature: float) -> Drawn:
        """A round of short completions at a temperature, without filters of tokens."""
        if temperature not in self._plain:
            self._plain[temperature] = self._draw(self._task_at(temperature), 1)[0]
        return self._plain[temperature]

    def at(self, temperature: float) -> RLConfig:
        """The small config at a temperature, with short completions and no filter of tokens."""
        config = self._short()
        rollout = replace(
            config.rollout, temperature=temperature, top_p=1.0, top_k=0, min_p=0.0, min_tokens=0
        )
        return replace(config, rollout=rollout)

    def evaluate(self, rows: Rows, temperature: float) -> dict[str, float]:
        """The loss's figures over rows, at a temperature."""
        own = temperature == self.config.rollout.temperature
        task = self.patient.task if own else self._task_at(temperature)
        return self.patient.evaluate(padded(rows, self.patient.unit), task)

    def _task_at(self, temperature: float) -> Task:
        if temperature not in self._tasks:
            self._tasks[temperature] = task_of(self.at(temperature), self.parts)
        return self._tasks[temperature]

    def teaching_rows(self) -> Rows:
        """The first step's rows with advantages and returns that are never all alike."""
        rows = with_old(self.rounds[0].steps[0])
        draw = np.random.default_rng(0)
        for name in ("advantages", "returns"):
            if name in rows:
                drawn = draw.normal(size=rows[name].shape).astype(np.float32)
                rows[name] = np.where(rows["loss_mask"] > 0, drawn, 0)
        return padded(rows, self.patient.unit)

    def _short(self) -> RLConfig:
        config = self.config
        tokens = min(config.rollout.max_tokens, _SHORT)
        few = min(config.rollout.min_tokens, tokens)
        rollout = replace(config.rollout, max_tokens=tokens, min_tokens=few)
        return replace(config, rollout=rollout)

    def _draw(self, task: Task, rounds: int) -> list[Drawn]:
        stream: Any = task.batches("train", Hosts())
        assert isinstance(stream, RolloutStream)
        assert isinstance(stream.source, OnPolicy)
        kept = _Remembering(stream.source.collector)
        stream.source.collector = kept
        per_round = self.config.steps_per_round
        found = []
        for number in range(rounds):
            steps = []
            for step in range(per_round):
                assert task.follow is not None
                task.follow(number * per_round + step, lambda: self.patient.model)
                steps.append(next(stream))
            found.append(
                Drawn(collected=kept.rounds[number], steps=steps, numbers=stream.observe())
            )
        stream.samples.close()
        return found

    def close(self) -> None:
        """End the sampler and the processes of rewards and tools."""
        for sampler in self._samplers:
            sampler.close()
        made = self.__dict__.get("parts")
        if made is not None and made.judge is not None:
            made.judge.close()
        if made is not None and isinstance(made.draw, Closable):
            made.draw.close()


class _Remembering(Collector):
    """A collector that keeps what it collects."""

    def __init__(self, inner: Collector) -> None:
        super().__init__(**{name.name: getattr(inner, name.name) for name in fields(inner)})
        self.rounds: list[Collected] = []

    def __call__(self, sampler: Sampler, number: int) -> Collected:
        """Collect, and keep it."""
        self.rounds.append(super().__call__(sampler, number))
        return self.rounds[-1]


def padded(rows: Rows, unit: int) -> Rows:
    """Rows of zeros added up to a multiple of `unit`: padding, which no loss counts."""
    count = len(rows["tokens"])
    more = -count % unit
    return {
        name: np.concatenate([x, np.zeros((more, *x.shape[1:]), x.dtype)])
        for name, x in rows.items()
    }


def with_old(rows: Rows) -> Rows:
    """Rows whose ratios count from the sampler's own log-probs."""
    return rows | {"old_logps": rows["sampler_logps"]}
