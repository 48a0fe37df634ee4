"""What all checks of a preflight share: the shrunk config, its rows, the reference, the noise."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from fornax.config import dump_yaml
from fornax.optim.tree import flatten
from fornax.plan.preflight.compare import Comparison, compare, compare_number
from fornax.plan.preflight.inputs import first_rows, start_state
from fornax.plan.preflight.programs import Outcome, Program, Update, joined
from fornax.plan.preflight.reference import Reference, Result
from fornax.plan.preflight.shrink import Shrunk, float32, with_mesh
from fornax.plan.preflight.tolerance import Noise, Tolerance, allowance, measure_noise, unit
from fornax.train import TrainConfig
from fornax.train.state import TrainState

__all__ = ["Failed", "Lab", "NotUsed", "without_remat"]

Rows = dict[str, np.ndarray]


class Failed(Exception):  # noqa: N818  (an answer, not an error of the program)
    """A check found something that is not a difference between numbers."""


class NotUsed(Exception):  # noqa: N818
    """There is nothing to check, for the reason given."""


def without_remat(config: TrainConfig) -> TrainConfig:
    """The config with everything kept for the backward pass."""
    names = {field.name for field in dataclasses.fields(config)}
    lists: Any = {name: () for name in ("remat_save", "remat_offload") if name in names}
    return dataclasses.replace(config, remat="none", **lists)


@dataclass(frozen=True)
class Expected:
    """What the reference says about some rows, and how exactly."""

    loss: float
    gradients: dict[str, np.ndarray]
    z_loss: float
    noise: Noise


class Lab:
    """One shrunk config with everything that is computed once for all checks."""

    def __init__(self, shrunk: Shrunk):
        """Nothing is computed until a check asks for it."""
        self.shrunk = shrunk
        self.config = shrunk.config
        """The whole mesh and every choice of the user's."""
        self.single = with_mesh(
            dataclasses.replace(without_remat(float32(shrunk.config)), accumulate=1)
        )
        """One device, float32, nothing accumulated or recomputed."""
        self._programs: dict[tuple[str, str | None], Program] = {}
        self._updates: dict[str, Update] = {}
        self._expected: dict[Any, Expected] = {}

    @functools.cached_property
    def rows(self) -> Rows:
        """A batch."""
        return first_rows(self.config)

    @functools.cached_property
    def state(self) -> TrainState:
        """What every program starts from; on the host."""
        return start_state(self.single, self.config.dtypes.param_dtype)

    @functools.cached_property
    def _reference(self) -> Reference:
        return Reference(self.single)

    @property
    def terms(self) -> int:
        """The longest sum in a gradient."""
        model = self.config.model
        assert model is not None
        return max(
            self.rows["tokens"].size,
            model.hidden_size,
            model.intermediate_size,
            model.vocab_size,
            model.num_heads * model.head_width,
        )

    def expected(self, dtype: str, rows: Rows | None = None, params: Any = None) -> Expected:
        """The reference's answer, with the noise of computing in `dtype`."""
        rows = self.rows if rows is None else rows
        tree = self.state.params if params is None else params
        flat = {path: np.asarray(x, np.float32) for path, x in flatten(tree).items()}
        key = (dtype, *(id(x) for x in rows.values()), *(x.tobytes()[:64] for x in flat.values()))
        if key not in self._expected:
            result: Result = self._reference(flat, rows)
            z_loss = self._reference.z_loss
            noise = measure_noise(
                lambda moved: self._reference(moved, rows),
                flat,
                result,
                u=unit(dtype),
                seed=self.config.seed,
            )
            self._expected[key] = Expected(result[0], result[1], z_loss, noise)
            self._kept = [*getattr(self, "_kept", []), rows]  # so that no id is given twice
        return self._expected[key]

    def program(self, config: TrainConfig, implementation: str | None = None) -> Program:
        """The trainer's program of a config on virtual devices; each is compiled once."""
        key = (dump_yaml(config), implementation)
        if key not in self._programs:
            count = math.prod(config.mesh.axis_sizes().values())
            devices = jax.devices()[:count]
            self._programs[key] = Program(config, devices, implementation=implementation)
        return self._programs[key]

    def verify(
        self, program: Program, *, rows: Rows | None = None, state: TrainState | None = None
    ) -> Comparison:
        """Run a step; hold its loss, gradients and update against the reference.

        Raises:
          Failed: for a step that was skipped, weights that do not add up, or copies of an array
            that differ between devices.
        """
        rows = self.rows if rows is None else rows
        state = self.state if state is None else state
        outcome = program.run(state, rows)
        params = state.params
        expected = self.expected(program.config.dtypes.compute, rows, params)
        found = self.judge(program, outcome, expected, rows)
        return found.then(self.judge_update(program, state, outcome))

    def judge(
        self, program: Program, outcome: Outcome, expected: Expected, rows: Rows
    ) -> Comparison:
        """The loss and the gradients of a step against what they should be."""
        weight = float(rows["loss_weights"].sum())
        if outcome.weight != weight:
            raise Failed(f"the weights of the batch add up to {outcome.weight:g}, not {weight:g}")
        if outcome.metrics["skipped"]:
            raise Failed(f"the step was skipped: its loss is {outcome.loss} and not finite")
        dtypes = program.config.dtypes
        factor = allowance(dtypes.compute, self.terms)
        tokens = int(np.count_nonzero(rows["loss_weights"]))
        allowed = expected.noise.of_loss(expected.loss, factor, tokens, dtypes.compute)
        found = compare_number("loss", outcome.loss, expected.loss, allowed)
        tolerances = {
            path: expected.noise.tolerance(path, value, factor, unit(dtypes.params))
            for path, value in expected.gradients.items()
        }
        found = found.then(compare("gradient", outcome.gradients, expected.gradients, tolerances))
        if found.divergence is None and outcome.disagreeing:
            raise Failed(
                f"copies of {outcome.disagreeing[0]} differ between devices: each updated it with "
                "a gradient of its own"
            )
        return found

    def judge_update(self, program: Program, state: TrainState, outcome: Outcome) -> Comparison:
        """The update against what the optimizer makes of the same gradients on one device."""
        dtypes = program.config.dtypes
        key = dtypes.params
        if key not in self._updates:
            self._updates[key] = Update(dataclasses.replace(self.single, dtypes=dtypes))
        update = self._updates[key]
        state = _cast(state, outcome)

        def compute(gradients: Mapping[str, np.ndarray]) -> tuple[float, Any]:
            return 0.0, update(state, gradients)

        result = compute(outcome.gradients)
        u = unit(dtypes.params)
        noise = measure_noise(compute, outcome.gradients, result, u=u, seed=self.config.seed)
        numbers = sum(x.size for x in outcome.gradients.values())
        factor = allowance(dtypes.params, numbers)
        tolerances: dict[str, Tolerance] = {
            path: noise.tolerance(path, value, factor, u) for path, value in result[1].items()
        }
        got = joined(outcome.params, outcome.optimizer)
        return compare("updated value", got, result[1], tolerances)


def _cast(state: TrainState, outcome: Outcome) -> TrainState:
    """A state on the host in the dtypes that a program keeps it in."""
    kept = dataclasses.replace(outcome.state, rng=state.rng)
    return jax.tree.map(lambda x, like: np.asarray(x).astype(like.dtype), state, kept)
