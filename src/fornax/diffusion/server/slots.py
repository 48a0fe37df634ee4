"""Rows of different requests in one batch, each at its own step: join, advance, leave.

A row's coefficients are its own (`sampling.advance`), so a request joins at any step of the others.
All batches of one shape run one compiled program of a fixed number of rows; on one device a row's
values then do not depend on the others' bit for bit, since a program's arithmetic is the same
whatever it computes on.

Legend: S slots, B rows of a program, K claims remembered, X axes of a latent, N steps.
"""

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fornax.config.errors import ConfigError
from fornax.diffusion.models.condition import Condition
from fornax.diffusion.pipelines import Job, Pipeline
from fornax.diffusion.pipelines.step_cache import NEVER
from fornax.diffusion.predictions import Point
from fornax.diffusion.samplers import Table
from fornax.diffusion.sampling import Row, State, advance, inpaint, row_noise

__all__ = ["MEMORY", "Programs", "Slots", "kind_of"]

MEMORY = 3
"""Claims that a slot remembers, which is what the samplers of `SAMPLERS` read at most."""


class _Rows(NamedTuple):
    """What lies on the device of all slots, and of one scratch slot behind them: a row each."""

    x_SX: jax.Array
    z_SX: jax.Array
    d_SKX: jax.Array
    condition: Condition
    empty: Condition | None
    scale: jax.Array
    keys: jax.Array
    keep: tuple[jax.Array, jax.Array, jax.Array]
    kept: Any
    """Of a cache of steps: [S, evaluations of a row at once, ...]; None without one."""


class _Step(NamedTuple):
    """A step's numbers of B rows, float32 but for the whole numbers at the front."""

    slot: np.ndarray
    number: np.ndarray
    point: np.ndarray
    then: np.ndarray
    correct: np.ndarray
    update: np.ndarray
    noise: np.ndarray
    ask: np.ndarray
    """int8, for a cache of steps."""


def kind_of(job: Job) -> Hashable:
    """What jobs that share a program have in common: shapes, dtypes, whether they are guided."""
    leaves, structure = jax.tree.flatten((job.start_BX, job.condition, job.empty))
    return structure, tuple((leaf.shape[1:], str(leaf.dtype)) for leaf in leaves)


class Programs:
    """The compiled programs of a pipeline's slots; jax keeps one of each kind and width."""

    def __init__(self, pipeline: Pipeline):
        """Split the denoiser into what is compiled and its arrays."""
        self._pipeline = pipeline
        self._graph, self._arrays = nnx.split(pipeline.denoiser)
        self.put = jax.jit(_put, donate_argnums=0)
        self.take = jax.jit(_take)
        self._step = jax.jit(self._advance, donate_argnums=1)

    def kept(self, job: Job) -> Any:
        """What a cache of steps begins with for a row of a job's kind; None without one."""
        pipeline = self._pipeline
        if pipeline.cache is None:
            return None
        rows, denoiser = _row(job, 0), nnx.merge(self._graph, self._arrays)
        kept = pipeline.kept(denoiser, rows.condition, rows.empty, rows.x_SX, pipeline.cache)
        return _by_row(kept, 1)

    def step(self, rows: _Rows, step: _Step) -> _Rows:
        """One step of the rows that `step` names; what held `rows` is gone."""
        return self._step(self._arrays, rows, step)

    def _advance(self, arrays: Any, rows: _Rows, step: _Step) -> _Rows:
        pipeline = self._pipeline
        taken: _Rows = jax.tree.map(lambda leaf: leaf[step.slot], rows)
        state = State(taken.x_SX, taken.z_SX, jnp.moveaxis(taken.d_SKX, 1, 0))
        row = Row(
            Point(*jnp.asarray(step.point).T),
            tuple(jnp.asarray(step.correct).T),
            tuple(jnp.asarray(step.update).T),
            jnp.asarray(step.noise),
        )
        denoiser = nnx.merge(self._graph, arrays)
        given = denoiser, taken.condition, taken.empty, taken.scale
        if pipeline.cache is None:
            output_BX, kept = pipeline.network(*given)(state.x_BX, row.point), None
        else:
            network = pipeline.keeping(*given, pipeline.cache)
            output_BX, kept = network(
                state.x_BX, row.point, _joined(taken.kept), jnp.asarray(step.ask)
            )
            kept = _by_row(kept, len(step.slot))
        data_BX = pipeline.claim(output_BX, state.x_BX, row.point)
        fresh_BX = row_noise(
            taken.keys, jnp.asarray(step.number), state.x_BX.shape, state.x_BX.dtype
        )
        state = advance(state, data_BX, row, fresh_BX)
        x_BX = inpaint(*taken.keep)(state.x_BX, Point(*jnp.asarray(step.then).T))
        return rows._replace(
            x_SX=rows.x_SX.at[step.slot].set(x_BX),
            z_SX=rows.z_SX.at[step.slot].set(state.z_BX),
            d_SKX=rows.d_SKX.at[step.slot].set(jnp.moveaxis(state.d_KBX, 0, 1)),
            kept=jax.tree.map(lambda all_, now: all_.at[step.slot].set(now), rows.kept, kept),
        )


def _joined(kept: Any) -> Any:
    """[B, n, ...] of each row's evaluations as the [n B, ...] of one evaluation of all."""
    return jax.tree.map(lambda a: jnp.moveaxis(a, 1, 0).reshape(-1, *a.shape[2:]), kept)


def _by_row(kept: Any, rows: int) -> Any:
    """The inverse of `_joined`."""
    return jax.tree.map(lambda a: jnp.moveaxis(a.reshape(-1, rows, *a.shape[1:]), 0, 1), kept)


def _put(rows: _Rows, row: _Rows, slot: jax.Array) -> _Rows:
    return jax.tree.map(lambda whole, one: whole.at[slot].set(one[0]), rows, row)


def _take(rows_SX: jax.Array, slot: jax.Array) -> jax.Array:
    return rows_SX[slot][None]


class Slots:
    """Slots for rows of one kind."""

    def __init__(self, programs: Programs, job: Job, widths: Sequence[int]):
        """Empty slots for rows like those of `job`, as many as the widest program has rows.

        Args:
          programs: of the pipeline.
          job: of the kind.
          widths: rows of each program; a step runs the narrowest that holds all busy slots.
        """
        self._programs = programs
        self._widths = sorted(widths)
        self.size = self._widths[-1]
        self._tables: list[Table | None] = [None] * self.size
        self._asks: list[np.ndarray | None] = [None] * self.size
        self._steps = np.zeros(self.size, np.int64)
        self._kept = programs.kept(job)
        self._rows: _Rows = jax.tree.map(
            lambda leaf: jnp.zeros((self.size + 1, *leaf.shape[1:]), leaf.dtype),
            self._row(job, 0),
        )

    @property
    def free(self) -> list[int]:
        """Slots that hold nothing."""
        return [slot for slot, table in enumerate(self._tables) if table is None]

    @property
    def busy(self) -> list[int]:
        """Slots that hold a row."""
        return [slot for slot, table in enumerate(self._tables) if table is not None]

    def join(self, slot: int, job: Job, row: int) -> None:
        """Put a row of a job into a free slot.

        Raises:
          ConfigError: its sampler remembers more than slots do.
        """
        table = job.table
        if table.memory > MEMORY:
            raise ConfigError(
                f"the sampler reads {table.memory} claims back and slots remember {MEMORY}; use "
                "another sampler"
            )
        self._rows = self._programs.put(self._rows, self._row(job, row), slot)
        self._tables[slot], self._asks[slot] = table, job.asks
        self._steps[slot] = 0

    def _row(self, job: Job, row: int) -> _Rows:
        return _row(job, row)._replace(kept=self._kept)

    def leave(self, slot: int) -> None:
        """Free a slot."""
        self._tables[slot] = None

    def step_of(self, slot: int) -> tuple[int, int]:
        """Steps that a row has made, and that it makes in all."""
        table = self._tables[slot]
        assert table is not None, "the slot is free"
        return int(self._steps[slot]), table.evaluations

    def latent(self, slot: int) -> jax.Array:
        """The state [1, *X] of a row: its latent, once all its steps are made."""
        return self._programs.take(self._rows.x_SX, slot)

    def claim(self, slot: int) -> jax.Array:
        """The data [1, *X] that the network last claimed of a row."""
        return self._programs.take(self._rows.d_SKX, slot)[:, 0]

    def width(self, rows: int) -> int:
        """Rows of the program that a step of this many rows runs."""
        return next(width for width in self._widths if width >= rows)

    def advance(self) -> list[int]:
        """One step of every busy slot; those which made their last."""
        slots = self.busy
        self._rows = self._programs.step(self._rows, self._step(slots, self.width(len(slots))))
        # The next step's rows are known only now, and a request must not wait behind many.
        jax.block_until_ready(self._rows.x_SX)
        self._steps[slots] += 1
        return [slot for slot in slots if self._steps[slot] == self.step_of(slot)[1]]

    def _step(self, slots: Sequence[int], width: int) -> _Step:
        step = _Step(
            slot=np.full(width, self.size, np.int32),
            number=np.zeros(width, np.int32),
            # What rows without a slot compute on: any level that divides by no zero.
            point=np.tile(np.asarray([0, 1, 0.5], np.float32), (width, 1)),
            then=np.tile(np.asarray([0, 1, 0], np.float32), (width, 1)),
            correct=np.zeros((width, 2 + MEMORY), np.float32),
            update=np.zeros((width, 1 + MEMORY), np.float32),
            noise=np.zeros(width, np.float32),
            ask=np.full(width, NEVER, np.int8),
        )
        for row, slot in enumerate(slots):
            table, at = self._tables[slot], int(self._steps[slot])
            assert table is not None, "busy"
            step.slot[row], step.number[row] = slot, at
            step.point[row], step.then[row] = table.points[at], table.points[at + 1]
            step.correct[row, : 2 + table.memory] = table.correct[at]
            step.update[row, : 1 + table.memory] = table.update[at]
            step.noise[row] = table.noise[at]
            asks = self._asks[slot]
            if asks is not None:
                step.ask[row] = asks[at]
        return step


def _row(job: Job, row: int) -> _Rows:
    """A row of a job as the rows of a batch of one."""
    x_BX = job.start_BX[row : row + 1]
    keep = job.keep
    if keep is None:  # everything is drawn
        zeros = jnp.zeros_like(x_BX)
        keep = (zeros, jnp.ones_like(x_BX[..., :1]), zeros)
    else:
        keep = (keep[0][row : row + 1], keep[1][row : row + 1], keep[2][row : row + 1])
    d_BKX = jnp.zeros((1, MEMORY, *x_BX.shape[1:]), x_BX.dtype)
    condition, empty, scale, keys = jax.tree.map(
        lambda leaf: leaf[row : row + 1], (job.condition, job.empty, job.scale, job.keys)
    )
    return _Rows(x_BX, x_BX, d_BKX, condition, empty, scale, keys, keep, None)
