"""The rows of reinforcement learning as the trainer's batches: a round whenever one is used up."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
import numpy as np
from flax import nnx

from fornax.tune.data import array_state, from_array_state
from fornax.tune.rl.report import round_numbers
from fornax.tune.rl.rollouts import Collected
from fornax.tune.rl.rounds import Round, Rows
from fornax.tune.rl.samples import SamplesFile

__all__ = ["Controller", "RolloutStream", "Source"]

Current = Callable[[], nnx.Module]


class Source(Protocol):
    """Where rounds come from: drawn when asked for, or ahead of time."""

    def follow(self, step: int, current: Current) -> None:
        """Told before each optimizer step: how many are done, and the weights."""
        ...

    def take(self, number: int) -> Collected:
        """Round `number`."""
        ...

    def state(self) -> dict[str, Any]:
        """Where it stands, as a tree of JSON and arrays."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        ...

    def close(self) -> None:
        """End what runs."""
        ...


class Controller(Protocol):
    """A coefficient that follows the run."""

    def update(self, numbers: Mapping[str, float]) -> dict[str, float]:
        """Take a round's numbers; returns what is reported of the controller."""
        ...

    def state(self) -> dict[str, float]:
        """All it remembers."""
        ...

    def restore(self, state: Mapping[str, float]) -> None:
        """Remember again."""
        ...


@dataclass(kw_only=True)
class RolloutStream:
    """Draws a round, trains on it as often as asked, and draws the next.

    Its position is whole: the rows of a round that are not yet trained on are in it, so that a
    resumed run takes exactly the steps that the killed one would have taken.
    """

    source: Source
    prepare: Callable[[Collected, Callable[[], nnx.Module]], Round]
    """(completions, the model before the round's first step) to rows."""
    samples: SamplesFile
    group_size: int
    controller: Controller | None = None
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
        """See `Task.follow`."""
        self._step, self._current = step, current
        self.source.follow(step, current)

    def observe(self) -> dict[str, float]:
        """See `Task.observe`: the numbers of the round that the latest rows are of."""
        if self._version < 0:
            return self._numbers
        return self._numbers | {"staleness": float(self._step - self._version)}

    def __iter__(self) -> "RolloutStream":
        """Itself."""
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        """The rows of the next optimizer step."""
        if not self._order:
            self._begin()
        return self._steps[self._order.pop(0)]

    def _begin(self) -> None:
        if self._current is None:
            raise RuntimeError("follow() gives the weights before rows are asked for")
        if not self._truncated:  # a run that goes on makes these rounds again
            self.samples.keep(self._number)
            self._truncated = True
        speed = self._speed(self._current)
        collected = self.source.take(self._number)
        self._number += 1
        made = self.prepare(collected, self._current)
        self.samples.write(self._step + 1, collected, made.credit)
        numbers = round_numbers(collected, made.credit, group_size=self.group_size) | speed
        numbers |= made.numbers
        if self.controller is not None:
            numbers |= self.controller.update(numbers)
        self._steps, self._order, self._numbers = made.steps, list(made.order), numbers
        self._version = collected.version
        seen = sum(float(made.steps[i]["loss_mask"].sum()) for i in made.order)
        self._training = (time.monotonic(), seen)

    def _speed(self, current: Current) -> dict[str, float]:
        """How fast the round before was trained on; its last step is waited for."""
        if self._training is None:
            return {}
        jax.block_until_ready(jax.tree.leaves(nnx.state(current(), nnx.Param)))
        began, tokens = self._training
        return {"train_tokens_per_second": tokens / max(time.monotonic() - began, 1e-9)}

    def state(self) -> dict[int, dict]:
        """The position: what is begun and not finished, whole."""
        tree = {
            "number": self._number,
            "version": self._version,
            "numbers": self._numbers,
            "order": list(self._order),
            "steps": self._steps if self._order else [],
            "controller": {} if self.controller is None else self.controller.state(),
            "source": self.source.state(),
        }
        return {0: array_state(tree)}

    def restore(self, state: dict[int, dict], *, allow_changes: bool = False) -> None:
        """Go to a position."""
        del allow_changes
        tree = from_array_state(state[0])
        self._number, self._version = tree["number"], tree["version"]
        self._numbers, self._order, self._steps = tree["numbers"], tree["order"], tree["steps"]
        if self.controller is not None:
            self.controller.restore(tree["controller"])
        self.source.restore(tree["source"])
        self._training = None

    def close(self) -> None:
        """End what runs, and close the file of samples."""
        self.source.close()
        self.samples.close()
