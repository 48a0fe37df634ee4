"""What all checks share: the shrunk config, its rows and first state, its programs, the reference.

A check is a `Case`: something to run, and how its answer becomes a line of the report.
"""

import dataclasses
import functools
import hashlib
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import jax.typing
import numpy as np

from fornax.config import FornaxError, dump_yaml
from fornax.optim.tree import flatten, rebuild
from fornax.preflight.programs import (
    Outcome,
    Program,
    Reference,
    Update,
    joined,
    make_reference,
    make_update,
)
from fornax.preflight.report import Check, Group
from fornax.preflight.shrink import Shrunk, float32, with_mesh
from fornax.preflight.subject import Rows, Subject
from fornax.preflight.tolerance import (
    Comparison,
    Noise,
    allowance,
    compare,
    compare_number,
    measure_noise,
    unit,
)
from fornax.train import Ledger, Task, TrainerConfig
from fornax.train.session import first_state, prepare
from fornax.train.state import TrainState

__all__ = ["Case", "CheckFailed", "CheckSkipped", "Harness", "run_case"]


class CheckFailed(Exception):  # noqa: N818  (an answer, not an error of the program)
    """A check found something that is not a difference between numbers."""


class CheckSkipped(Exception):  # noqa: N818
    """There is nothing to check, for the reason given."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One check that can be run."""

    group: Group
    name: str
    run: Callable[[], str | Comparison]
    """Returns what was compared bit by bit in words, or a comparison; raises `CheckFailed` or
    `CheckSkipped`."""
    isolated: bool = False
    """Whether it is one choice without the others: a quick preflight runs it only when the choices
    together fail."""


def run_case(case: Case) -> Check:
    """Run one check. Whatever the program under test raises is a failure of it."""
    began = time.monotonic()
    found = None
    try:
        result = case.run()
        if isinstance(result, Comparison):
            found = result
            result = "" if found.divergence is None else str(found.divergence)
        status = "failed" if found and found.divergence else "ok"
        detail = result
    except CheckSkipped as reason:
        status, detail = "off", str(reason)
    except (CheckFailed, FornaxError) as error:
        status, detail = "failed", str(error)
    except Exception as error:
        lines = str(error).strip().splitlines()
        status = "failed"
        detail = f"it does not run: {type(error).__name__}: {lines[0][:300] if lines else ''}"
    return Check(
        group=case.group,
        name=case.name,
        status=status,
        detail=detail,
        divergence=None if found is None else found.divergence,
        margin=None if found is None else found.margin,
        seconds=round(time.monotonic() - began, 2),
    )


@dataclass(frozen=True)
class Expected:
    """What the reference says about some rows, and how exactly."""

    loss: float
    gradients: Mapping[str, np.ndarray]
    z_loss: float
    noise: Noise


class Harness:
    """One shrunk config with everything that is computed once for all checks."""

    def __init__(self, shrunk: Shrunk[Any], subject: Subject):
        """Nothing is computed until a check asks for it."""
        self.shrunk, self.subject = shrunk, subject
        self.config = shrunk.config
        """The whole mesh and every choice of the user's."""
        self.single = with_mesh(
            dataclasses.replace(subject.without_remat(float32(shrunk.config)), accumulate=1)
        )
        """One device, float32, nothing accumulated or recomputed."""
        self._programs: dict[tuple[str, str | None], Program] = {}
        self._updates: dict[str, Update] = {}
        self._states: dict[str, TrainState] = {}
        self._expected: dict[bytes, Expected] = {}

    @functools.cached_property
    def rows(self) -> Rows:
        """A batch."""
        return self.subject.rows(self.config)

    @functools.cached_property
    def state(self) -> TrainState:
        """What every program starts from; on the host."""
        task = self.subject.task(self.single)
        return start_state(self.single, task, self.config.dtypes.param_dtype)

    def state_of(self, program: Program) -> TrainState:
        """`state` with the optimizer's as it is for a program's own dtype of parameters."""
        dtype = program.config.dtypes.params
        if dtype not in self._states:
            like = program.plain.abstract.params
            params = jax.tree.map(
                lambda x, spec: jnp.asarray(x, spec.dtype), self.state.params, like
            )
            optimizer = jax.jit(program.plain.parts.optim.init)(params)
            optimizer = jax.tree.map(np.asarray, optimizer)
            self._states[dtype] = dataclasses.replace(self.state, optimizer=optimizer)
        return self._states[dtype]

    @functools.cached_property
    def _reference(self) -> Reference:
        return make_reference(self.single, self.subject)

    @property
    def terms(self) -> int:
        """The longest sum in a gradient."""
        return self.subject.terms(self.config, self.rows)

    def expected(
        self, dtype: str, rows: Rows | None = None, state: TrainState | None = None
    ) -> Expected:
        """The reference's answer, with the noise of computing in `dtype`."""
        rows = self.rows if rows is None else rows
        state = self.state if state is None else state
        flat = {path: np.asarray(x, np.float32) for path, x in flatten(state.params).items()}
        other = {path: np.asarray(x) for path, x in flatten(state.other).items()}
        key = _digest(dtype, rows, flat, other)
        if key not in self._expected:
            loss, gradients, z_loss = self._reference(flat, state.other, rows)
            noise = measure_noise(
                lambda moved: self._reference(moved, state.other, rows)[:2],
                flat,
                (loss, gradients),
                u=unit(dtype),
                seed=self.config.seed,
            )
            self._expected[key] = Expected(loss, gradients, z_loss, noise)
        return self._expected[key]

    def program(self, config: TrainerConfig, implementation: str | None = None) -> Program:
        """The trainer's program of a config on virtual devices; each is compiled once."""
        key = (dump_yaml(config), implementation)
        if key not in self._programs:
            count = math.prod(config.mesh.axis_sizes().values())
            devices = jax.devices()[:count]
            task = self.subject.task(config, implementation)
            self._programs[key] = Program(config, task, devices)
        return self._programs[key]

    def verify(self, program: Program, rows: Rows | None = None) -> Comparison:
        """Run a step; hold its loss, gradients and update against the reference.

        Raises:
          CheckFailed: for a step that was skipped, weights that do not add up, or copies of an
            array that differ between devices.
        """
        rows = self.rows if rows is None else rows
        outcome = program.run(self.state_of(program), rows)
        expected = self.expected(program.config.dtypes.compute, rows)
        found = self.check_step(program, outcome, expected, rows)
        return found.then(self._check_update(program, outcome))

    def check_step(
        self, program: Program, outcome: Outcome, expected: Expected, rows: Rows
    ) -> Comparison:
        """Hold the loss and the gradients of a step against what they should be."""
        weights = rows[self.subject.weights]
        weight = float(weights.sum())
        if outcome.weight != weight:
            raise CheckFailed(
                f"the weights of the batch add up to {outcome.weight:g}, not {weight:g}"
            )
        if outcome.metrics["skipped"]:
            raise CheckFailed(f"the step was skipped: its loss is {outcome.loss} and not finite")
        dtypes = program.config.dtypes
        factor = allowance(dtypes.compute, self.terms)
        parts = int(np.count_nonzero(weights))
        allowed = expected.noise.of_loss(expected.loss, factor, parts, dtypes.compute)
        found = compare_number("loss", outcome.loss, expected.loss, allowed)
        tolerances = {
            path: expected.noise.tolerance(path, value, factor, unit(dtypes.params))
            for path, value in expected.gradients.items()
        }
        found = found.then(compare("gradient", outcome.gradients, expected.gradients, tolerances))
        if found.divergence is None and outcome.disagreeing:
            raise CheckFailed(
                f"copies of {outcome.disagreeing[0]} differ between devices: each updated it with "
                "a gradient of its own"
            )
        return found

    def _check_update(self, program: Program, outcome: Outcome) -> Comparison:
        """Hold the update against the optimizer's, of the same gradients, on one device."""
        dtypes = program.config.dtypes
        u = unit(dtypes.params)
        if dtypes.params not in self._updates:
            config = dataclasses.replace(self.single, dtypes=dtypes)
            self._updates[dtypes.params] = make_update(config, self.subject.task(config))
        update = self._updates[dtypes.params]
        start = self.state_of(program)
        kept = dataclasses.replace(outcome.state, rng=start.rng)
        state = jax.tree.map(lambda x, like: np.asarray(x).astype(like.dtype), start, kept)

        def compute(gradients: Mapping[str, np.ndarray]) -> tuple[float, Rows]:
            return 0.0, update(state, gradients)

        _, want = result = compute(outcome.gradients)
        noise = measure_noise(compute, outcome.gradients, result, u=u, seed=self.config.seed)
        factor = allowance(dtypes.params, sum(x.size for x in outcome.gradients.values()))
        tolerances = {path: noise.tolerance(path, x, factor, u) for path, x in want.items()}
        got = joined(outcome.params, outcome.optimizer)
        return compare("updated value", got, want, tolerances)


def _digest(dtype: str, *arrays: Mapping[str, np.ndarray]) -> bytes:
    """A key for arrays of the same contents."""
    found = hashlib.blake2b(dtype.encode())
    for path, array in (item for each in arrays for item in each.items()):
        found.update(path.encode())
        found.update(array.tobytes())
    return found.digest()


def start_state(config: TrainerConfig, task: Task[Any], dtype: jax.typing.DTypeLike) -> TrainState:
    """The trainer's first state on the host, in float32, as after a little training.

    Parameters that start all equal (scales of norms, biases) get values of their own: with zeros
    or ones a fault in them would not show.

    Args:
      config: of one device, in float32.
      task: its task.
      dtype: parameters are rounded to it, so that keeping them in it loses nothing.
    """
    programs = prepare(config, task, Ledger(), jax.devices()[:1])
    state = first_state(config, programs)
    rng = np.random.default_rng(config.seed)

    def settle(x: jax.Array) -> np.ndarray:
        value = np.asarray(x)
        if value.size > 1 and (value == value.flat[0]).all():
            value = value + np.float32(0.1) * rng.standard_normal(value.shape, np.float32)
        return value.astype(dtype).astype(np.float32)

    params = {p: settle(x) for p, x in flatten(state.params).items()}
    tree = rebuild(state.params, params)
    other = {p: settle(x) for p, x in flatten(state.other).items()}
    optimizer = jax.jit(programs.parts.optim.init)(jax.tree.map(jnp.asarray, tree))
    other = rebuild(state.other, other)
    state = dataclasses.replace(state, params=tree, other=other, optimizer=optimizer)
    return jax.tree.map(np.asarray, state)
