"""Programs of tuning tasks compiled once and run from many seeds."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from fornax.train.goodput import Ledger
from fornax.train.session import Programs, first_state, prepare
from fornax.train.task import Task
from fornax.tune.config import TuneConfig

__all__ = ["Toy"]


class Toy:
    """A task's programs on some devices, and a first state to start from again and again."""

    def __init__(self, config: TuneConfig, task: Task, devices: int = 1):
        self.config, self.task = config, task
        chosen = jax.devices()[:devices]
        self.programs: Programs = prepare(config, task, Ledger(), chosen)
        self.first = jax.device_get(first_state(config, self.programs))

    def start(self, seed: int | None = None) -> Any:
        """The first state; with a seed, its trained matrices a little elsewhere."""
        state = self.first
        if seed is not None:
            rng = np.random.default_rng(seed)

            def moved(x: Any) -> Any:
                return x + 0.02 * rng.normal(size=x.shape).astype(x.dtype)

            state = jax.tree.map(lambda x: x, state)
            object.__setattr__(state, "params", jax.tree.map(moved, state.params))
        where = jax.tree.map(lambda leaf: leaf.sharding, self.programs.abstract)
        return jax.device_put(state, where)

    def run(
        self,
        steps: int,
        *,
        seed: int | None = None,
        stream: Any = None,
        edit: Callable[[dict[str, Any]], dict[str, Any]] = dict,
    ) -> tuple[Any, list[dict[str, float]]]:
        """The state and the metrics of some steps."""
        state = self.start(seed)
        stream = self.task.batches("train", self.programs.hosts) if stream is None else stream
        found = []
        for _ in range(steps):
            state, metrics = self.programs.step(state, edit(next(stream)))
            found.append({name: float(x) for name, x in jax.device_get(metrics).items()})
        return state, found
