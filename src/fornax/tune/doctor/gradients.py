"""Gradients of a small batch by the trainer's own accumulation, from a point beside the start.

Beside it, because adapters and heads begin at zero, where what they are multiplied with has no
gradient yet.

Legend: A micro-batches.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fornax.mesh import use_mesh
from fornax.train.hosts import to_global
from fornax.train.step import sum_gradients
from fornax.train.task import Batch, Loss, Task
from fornax.tune.doctor.patient import Patient, Rows, quick_options

__all__ = ["Gradients"]

_NUDGE = 1e-3
_SMALLEST = 0.05
"""A norm below which gradients are rounding: a teacher that the student equals, for instance."""


@dataclass(kw_only=True)
class Gradients:
    """Means over a batch, by how many micro-batches it is divided into."""

    patient: Patient
    rows: Rows
    """A multiple of `patient.unit` rows."""
    _found: dict[int, tuple[float, Any]] = field(default_factory=dict)

    def of(self, accumulate: int) -> tuple[float, Any]:
        """The mean loss and its gradients, with the run's own loss."""
        if accumulate not in self._found:
            self._found[accumulate] = self._compute(accumulate)
        return self._found[accumulate]

    def _compute(self, accumulate: int) -> tuple[float, Any]:
        patient = self.patient
        state, programs = patient.state, patient.programs
        parts = replace(programs.parts, accumulate=accumulate, task=_without_noise(patient))

        def run(params: Any, other: Any, batch: Batch, frozen: Any) -> tuple[jax.Array, Any]:
            held = replace(parts, model=parts.model.holding(frozen))
            with use_mesh(parts.mesh, parts.rules):
                loss, _, sums = sum_gradients(held, params, other, batch, jax.random.key(0))
            return loss.total / loss.weight, jax.tree.map(lambda g: g / loss.weight, sums)

        batch = to_global(self.rows, programs.shapes_of(self.rows))
        jitted = jax.jit(run, compiler_options=quick_options())
        loss, found = jitted(self.start, state.other, batch, programs.frozen)
        return float(loss), found

    @functools.cached_property
    def start(self) -> Any:
        """The trained parameters, those that are zero moved a little."""
        params = self.patient.state.params
        draw = np.random.default_rng(0)

        def nudged(x: jax.Array, largest: np.ndarray) -> jax.Array:
            if largest > 0:
                return x
            noise = (_NUDGE * draw.standard_normal(x.shape)).astype(x.dtype)
            return jax.device_put(noise, x.sharding)

        return jax.tree.map(nudged, params, jax.device_get(_largest(params)))

    def distance(self, accumulate: int) -> float:
        """How far the gradients of A micro-batches lie from those of one, over their norm."""
        one, other = self.of(1)[1], self.of(accumulate)[1]
        apart, norm = _norms(one, other)
        return float(apart) / max(float(norm), _SMALLEST)

    def without(self) -> tuple[list[str], list[str]]:
        """Paths of trained parameters with a gradient of zero, and with one that is no number."""
        largest = _largest(self.of(1)[1])
        pairs, _ = jax.tree_util.tree_flatten_with_path(jax.device_get(largest))
        named = [("/".join(str(key.key) for key in path), float(x)) for path, x in pairs]
        zero = [name for name, x in named if x == 0]
        return zero, [name for name, x in named if x != x or x == float("inf")]


@jax.jit
def _norms(one: Any, other: Any) -> tuple[jax.Array, jax.Array]:
    return optax.tree.norm(jax.tree.map(jnp.subtract, one, other)), optax.tree.norm(one)


@jax.jit
def _largest(grads: Any) -> Any:
    return jax.tree.map(lambda g: jnp.max(jnp.abs(g)), grads)


def _without_noise(patient: Patient) -> Task:
    """The task; where its loss draws noise, with the loss of its evaluation."""
    task = patient.task
    if not patient.noisy:
        return task
    quiet: Callable[[Any, Batch], Loss] | None = task.evaluate

    def loss(model: Any, batch: Batch, key: jax.Array) -> Loss:
        model.eval()
        return task.loss(model, batch, key) if quiet is None else quiet(model, batch)

    return replace(task, loss=loss)
