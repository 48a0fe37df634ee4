"""The rows of reinforcement learning as the trainer's batches: a round whenever one is used up."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import jax
import numpy as np
from flax import nnx

from fornax.config.jsonl import JsonLines, keep_json_lines
from fornax.data import Hosts
from fornax.tune.rl.collect import Collector
from fornax.tune.rl.credit import Credit, KLController, round_numbers
from fornax.tune.rl.packing import Round, Rows
from fornax.tune.rl.ranks import NoSampler, RoundLink
from fornax.tune.rl.rollouts import Rollout, RolloutBatch, from_arrays, to_arrays
from fornax.tune.rollout import AsyncRollouts, Sampler
from fornax.tune.rollout.sampler import Weights
from fornax.tune.rollout.storage import StateTree, array_state, from_array_state

__all__ = ["RolloutStream", "SamplesFile"]

_DETAILED, _LONGEST = 8, 2048
"""Completions of each round that are written token by token, and tokens of one."""


class SamplesFile:
    """Appends the samples of each round; a resumed run first drops those it will make again."""

    def __init__(self, path: Path, decode: Callable[[Sequence[int]], str]) -> None:
        """Write to `path`, prompts as the text that `decode` makes of tokens."""
        self._path = path
        self._decode = decode
        self._file: JsonLines | None = None

    def keep(self, rounds: int) -> None:
        """Keep the samples of the first `rounds` rounds only."""
        self.close()
        keep_json_lines(self._path, lambda record: record.get("round", rounds) < rounds)

    def write(self, step: int, collected: RolloutBatch, credit: Credit) -> None:
        """Append a round.

        Args:
          step: the first optimizer step that trains on it, from 1.
          collected: the completions.
          credit: their advantages.
        """
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = JsonLines(self._path)
        for number, rollout in enumerate(collected.rollouts):
            drawn = rollout.mask.astype(bool)
            advantages = credit.advantages[number][drawn]
            versions = rollout.versions[drawn]
            record: StateTree = {
                "step": step,
                "round": collected.number,
                "group": rollout.group,
                "where": rollout.where,
                "prompt": self._decode(rollout.prompt.tolist()),
                "completion": rollout.text
                if drawn.all()
                else self._decode(rollout.tokens.tolist()),
                "status": rollout.status,
                **({"error": rollout.error} if rollout.failed else {}),
                "reward": rollout.reward,
                "rewards": {k: v if math.isfinite(v) else None for k, v in rollout.parts.items()},
                "trained_reward": credit.rewards[number],
                "advantage": float(advantages.mean()) if drawn.any() else 0.0,
                "tokens": rollout.drawn,
                "finish_reason": rollout.finish_reason,
                "versions": [int(versions.min()), int(versions.max())] if drawn.any() else [],
            }
            if number < _DETAILED:
                record |= self._by_token(rollout, credit.advantages[number])
            self._file.write(record)

    def _by_token(self, rollout: Rollout, advantages: np.ndarray) -> StateTree:
        """The text of each token that follows the prompt, its log-probability under the weights
        that drew it, and its advantage; both null where the model did not draw it."""
        drawn = rollout.mask.astype(bool)[:_LONGEST].tolist()
        columns = {"logprobs": rollout.logprobs, "advantages": advantages}
        return {
            "pieces": [self._decode([token]) for token in rollout.tokens[:_LONGEST].tolist()],
            **{
                name: [
                    round(value, 4) if kept and math.isfinite(value) else None
                    for value, kept in zip(values.tolist(), drawn, strict=False)
                ]
                for name, values in columns.items()
            },
        }

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


Current = Callable[[], nnx.Module]
"""Gives the model as it is now."""


@dataclass(kw_only=True)
class RolloutStream:
    """Draws a round, trains on it as often as asked, and draws the next.

    Its position is whole: the rows of a round that are not yet trained on are in it, so that a
    resumed run takes exactly the steps that the killed one would have taken.

    In a run of several processes each has such a stream: process 0's draws, all get its rounds.
    """

    collector: Collector
    sampler: Callable[[nnx.Module], Sampler]
    """The model before the first round to a sampler of it."""
    weights: Callable[[nnx.Module], Weights]
    """The model to what `Sampler.update` takes."""
    steps_per_round: int
    ahead: int = 0
    """Rounds that are drawn in a thread while one is trained on, with the weights before it."""
    prepare: Callable[[RolloutBatch, Current], Round]
    """(completions, the model before the round's first step) to rows."""
    samples: SamplesFile
    group_size: int
    controller: KLController | None = None
    meet: Callable[[], RoundLink] | None = None
    """Connects the processes of the run; None where there is one."""
    hosts: Hosts = field(default_factory=Hosts)
    """Which rows are this process's."""
    _link: RoundLink | None = None
    _rollouts: AsyncRollouts[RolloutBatch] | None = None
    _sampler: Sampler | None = None
    _pending: StateTree | None = None
    _current: Current | None = None
    _step: int = 0
    _number: int = 0
    """Rounds begun."""
    _steps: list[Rows] = field(default_factory=list)
    _order: list[int] = field(default_factory=list)
    """Mini-batches of this round that are still to be trained on."""
    _numbers: dict[str, float] = field(default_factory=dict)
    _version: int = 0
    _training: tuple[float, float] | None = None
    """When the rows of this round were first handed over, and how many tokens its steps see."""
    _truncated: bool = False

    def follow(self, step: int, current: Current) -> None:
        """Told before each optimizer step: how many are done, and the weights."""
        self._step, self._current = step, current
        if self.ahead:
            self._following(current)

    def observe(self) -> dict[str, float]:
        if self._version < 0:
            return self._numbers
        return self._numbers | {"staleness": float(self._step - self._version)}

    def __iter__(self) -> "RolloutStream":
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        """The rows of the next optimizer step."""
        if not self._order:
            self._begin()
        rows = self._steps[self._order.pop(0)]
        count, index = self.hosts.count, self.hosts.index
        return {name: x[len(x) // count * index :][: len(x) // count] for name, x in rows.items()}

    def _begin(self) -> None:
        if self._current is None:
            raise RuntimeError("follow() gives the weights before rows are asked for")
        if not self._truncated and self._first:  # a run that is resumed makes these rounds again
            self.samples.keep(self._number)
            self._truncated = True
        speed = self._speed(self._current)
        with jax.profiler.TraceAnnotation("input/round"):
            collected = self._following(self._current).take(self._number)
        self._number += 1
        with jax.profiler.TraceAnnotation("input/prepare"):
            made = self.prepare(collected, self._current)
        if self._first:
            self.samples.write(self._step + 1, collected, made.credit)
        numbers = round_numbers(collected, made.credit, group_size=self.group_size) | speed
        numbers |= made.numbers
        if self.controller is not None:
            numbers |= self.controller.update(numbers)
        self._steps, self._order, self._numbers = made.steps, list(made.order), numbers
        self._version = collected.version
        seen = sum(float(made.steps[i]["loss_mask"].sum()) for i in made.order)
        self._training = (time.monotonic(), seen)

    def _following(self, current: Current) -> AsyncRollouts[RolloutBatch]:
        """The rollouts, given the newest weights; the first call makes the sampler."""
        if self._rollouts is None:
            self._sampler, make = self._begin_drawing(current)
            self._rollouts = AsyncRollouts(
                self._sampler,
                make,
                save=to_arrays,
                load=from_arrays,
                updates_per_batch=self.steps_per_round,
                max_staleness=self.steps_per_round * self.ahead,
                ahead=max(self.ahead, 1),
            )
            if self._pending:
                self._rollouts.restore(self._pending)
        self._rollouts.follow(self._step, lambda: self.weights(current()))
        return self._rollouts

    @property
    def _first(self) -> bool:
        return self.meet is None or jax.process_index() == 0

    def _begin_drawing(
        self, current: Current
    ) -> tuple[Sampler, Callable[[Sampler, int], RolloutBatch]]:
        """The sampler of this process, and what makes a round with it."""
        if self.meet is None:
            return self.sampler(current()), self.collector
        self._link = link = self.meet()
        made = self.sampler(current()) if self._first else NoSampler(link.close)
        link.interrupt = getattr(made, "interrupt", link.interrupt)
        return made, link.maker(self.collector, to_arrays, from_arrays)

    def _speed(self, current: Current) -> dict[str, float]:
        """How fast the round before was trained on; its last step is waited for."""
        if self._training is None:
            return {}
        jax.block_until_ready(jax.tree.leaves(nnx.state(current(), nnx.Param)))
        began, tokens = self._training
        return {"train_tokens_per_second": tokens / max(time.monotonic() - began, 1e-9)}

    def state(self) -> dict[int, dict]:
        """The position: what is begun and not finished; a round being drawn is waited for.

        Process 0 alone has one.
        """
        source: StateTree = {}
        if self.ahead:
            pending = self._pending if self._rollouts is None else self._rollouts.state()
            source["pending"] = pending or {}
        if not self._first:
            return {}
        source["collector"] = self.collector.state()
        tree = {
            "number": self._number,
            "version": self._version,
            "numbers": self._numbers,
            "order": list(self._order),
            "steps": self._steps if self._order else [],
            "controller": {} if self.controller is None else self.controller.state(),
            "source": source,
        }
        return {0: array_state(tree)}

    def restore(self, state: dict[int, dict], *, allow_changes: bool = False) -> None:
        del allow_changes
        tree = from_array_state(state[0])
        self._number, self._version = tree["number"], tree["version"]
        self._numbers, self._order, self._steps = tree["numbers"], tree["order"], tree["steps"]
        if self.controller is not None:
            self.controller.restore(tree["controller"])
        self.collector.restore(tree["source"]["collector"])
        self._pending = tree["source"].get("pending")
        self._training = None

    def close(self) -> None:
        """End the thread, the sampler and the rewards, and close the file of samples."""
        if self._rollouts is not None:
            self._rollouts.close()
        self.collector.close()
        if self._sampler is not None:
            self._sampler.close()
        if self._link is not None:
            self._link.close()
        self.samples.close()
