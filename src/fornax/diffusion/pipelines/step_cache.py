"""Caches of steps: a transformer's blocks are left out where they would hardly add another thing.

What the blocks add to the sample's tokens, the residual, changes little from one evaluation to the
next. A cache keeps it and adds it again where it expects little change: TeaCache (Liu et al. 2024)
by how far the input of the first block moved, MagCache (Ma et al. 2025) by magnitudes that were
measured before. Each row decides for itself, so that an image does not depend on what is drawn
beside it; the blocks run where any row needs them.

Legend: B rows, T tokens, D width, M evaluations of a run.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

__all__ = [
    "ALWAYS",
    "MAYBE",
    "NEVER",
    "Asks",
    "Memory",
    "Recorder",
    "Recording",
    "StepCache",
    "Stepper",
]

NEVER, MAYBE, ALWAYS = 0, 1, 2
"""Whether an evaluation of a row needs the blocks: they are left out, the signal says, they run."""

Blocks = Callable[[jax.Array], jax.Array]
Asks = NDArray[np.int8]
"""One of these for each evaluation."""


class Memory(NamedTuple):
    """What is kept of each row from evaluation to evaluation."""

    residual_BTD: jax.Array
    """What the blocks added when they last ran."""
    signal_BTD: jax.Array | None
    """The input of the first block at the evaluation before; None where nothing reads it."""
    distance_B: jax.Array
    """float32: the expected change since the blocks last ran."""
    ran_B: jax.Array
    """int32: evaluations at which the blocks ran."""


class Stepper(Protocol):
    """What runs a transformer's blocks in a run of a sampler."""

    def start(self, x_BTD: jax.Array, first: Callable[[], jax.Array]) -> Any:
        """What is kept before the first evaluation."""
        ...

    def step(
        self,
        kept: Any,
        ask_B: jax.Array,
        blocks: Blocks,
        x_BTD: jax.Array,
        first: Callable[[], jax.Array],
    ) -> tuple[jax.Array, Any]:
        """The tokens after the blocks, and what is kept now.

        Args:
          kept: from the evaluation before.
          ask_B: int8 of `NEVER`, `MAYBE` and `ALWAYS`.
          blocks: of the sample's tokens.
          x_BTD: those tokens.
          first: the input of the first block.
        """
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepCache:
    """A cache of steps.

    Attributes:
      kind: how it decides.
      threshold: of the expected change since the blocks last ran; at 0 they run always.
      coefficients: of TeaCache's polynomial, the highest power first: from the relative change of
        the first block's input to that expected of the residual. Where it is below 0 it counts 0.
      magnitudes: of MagCache, one for each evaluation of a run, the residual's length over that of
        the evaluation before. Runs of other lengths take the nearest.
      longest: evaluations in a row that MagCache leaves out at most.
      retained: share of a run at the beginning in which MagCache leaves out nothing.
    """

    kind: Literal["teacache", "magcache"]
    threshold: float
    coefficients: tuple[float, ...] = ()
    magnitudes: tuple[float, ...] = ()
    longest: int = 3
    retained: float = 0.2

    def asks(self, evaluations: int, whole: int) -> Asks:
        """For each evaluation of a run whether the blocks must run, [M].

        Args:
          evaluations: M, of the run.
          whole: of the whole schedule, of which the run is the end.
        """
        if self.kind == "teacache":
            asks = np.full(evaluations, MAYBE, np.int8)
            asks[[0, -1]] = ALWAYS
            return asks
        asks = np.full(evaluations, ALWAYS, np.int8)
        places = np.round(np.linspace(0, len(self.magnitudes) - 1, whole)).astype(int)
        ratios = np.asarray(self.magnitudes)[places] if whole > 1 else np.ones(1)
        begin, product, error, left_out = int(self.retained * whole + 0.5), 1.0, 0.0, 0
        for row, place in enumerate(range(whole - evaluations, whole)):
            if place < begin:
                continue
            product, left_out = product * ratios[place], left_out + 1
            error += abs(1 - product)
            small = error <= self.threshold and self.threshold > 0
            if row and small and left_out <= self.longest:
                asks[row] = NEVER
            else:
                product, error, left_out = 1.0, 0.0, 0
        return asks

    def start(self, x_BTD: jax.Array, first: Callable[[], jax.Array]) -> Memory:
        """See `Stepper`."""
        rows = x_BTD.shape[:1]
        return Memory(
            residual_BTD=jnp.zeros_like(x_BTD),
            signal_BTD=jnp.zeros_like(first()) if self.kind == "teacache" else None,
            distance_B=jnp.zeros(rows, jnp.float32),
            ran_B=jnp.zeros(rows, jnp.int32),
        )

    def step(
        self,
        kept: Memory,
        ask_B: jax.Array,
        blocks: Blocks,
        x_BTD: jax.Array,
        first: Callable[[], jax.Array],
    ) -> tuple[jax.Array, Memory]:
        """See `Stepper`."""
        wanted_B, signal_BTD, distance_B = ask_B == ALWAYS, kept.signal_BTD, kept.distance_B
        if signal_BTD is not None:
            new_BTD = first()
            change_B = _moved(new_BTD, signal_BTD)
            expected_B = jnp.polyval(jnp.asarray(self.coefficients, jnp.float32), change_B)
            distance_B = distance_B + jnp.maximum(expected_B, 0)
            wanted_B |= (ask_B == MAYBE) & ~(distance_B < self.threshold)
            signal_BTD, distance_B = new_BTD, jnp.where(wanted_B, 0, distance_B)
        any_wanted = jnp.any(wanted_B)

        def run() -> tuple[jax.Array, jax.Array]:
            y_BTD, own_B = blocks(x_BTD), wanted_B[:, None, None]
            return (
                jnp.where(own_B, y_BTD, x_BTD + kept.residual_BTD),
                jnp.where(own_B, y_BTD - x_BTD, kept.residual_BTD),
            )

        y_BTD, residual_BTD = jax.lax.cond(
            any_wanted, run, lambda: (x_BTD + kept.residual_BTD, kept.residual_BTD)
        )
        ran_B = kept.ran_B + any_wanted.astype(jnp.int32)
        return y_BTD, Memory(residual_BTD, signal_BTD, distance_B, ran_B)


class Recording(NamedTuple):
    """What was measured of the rows of a run."""

    residual_BTD: jax.Array
    signal_BTD: jax.Array
    number_B: jax.Array
    """int32: evaluations before."""
    ratios_BM: jax.Array
    """float32: mean over tokens of the residual's length over that of the evaluation before."""
    changes_BM: jax.Array
    """float32: relative change of the first block's input."""
    moves_BM: jax.Array
    """float32: relative change of the residual."""


@dataclasses.dataclass(frozen=True)
class Recorder:
    """Runs the blocks at every evaluation and measures what caches are made of.

    Attributes:
      evaluations: M.
    """

    evaluations: int

    def start(self, x_BTD: jax.Array, first: Callable[[], jax.Array]) -> Recording:
        """See `Stepper`."""
        rows = x_BTD.shape[:1]
        empty_BM = jnp.zeros((*rows, self.evaluations), jnp.float32)
        return Recording(
            residual_BTD=jnp.zeros_like(x_BTD),
            signal_BTD=jnp.zeros_like(first()),
            number_B=jnp.zeros(rows, jnp.int32),
            ratios_BM=empty_BM,
            changes_BM=empty_BM,
            moves_BM=empty_BM,
        )

    def step(
        self,
        kept: Recording,
        ask_B: jax.Array,
        blocks: Blocks,
        x_BTD: jax.Array,
        first: Callable[[], jax.Array],
    ) -> tuple[jax.Array, Recording]:
        """See `Stepper`."""
        del ask_B
        y_BTD, signal_BTD = blocks(x_BTD), first()
        residual_BTD = y_BTD - x_BTD
        ratio_BT = _lengths(residual_BTD) / (_lengths(kept.residual_BTD) + 1e-8)
        here_BM = jnp.arange(self.evaluations) == kept.number_B[:, None]

        def noted(notes_BM: jax.Array, value_B: jax.Array) -> jax.Array:
            return jnp.where(here_BM, value_B[:, None], notes_BM)

        return y_BTD, Recording(
            residual_BTD=residual_BTD,
            signal_BTD=signal_BTD,
            number_B=kept.number_B + 1,
            ratios_BM=noted(kept.ratios_BM, jnp.mean(ratio_BT, 1)),
            changes_BM=noted(kept.changes_BM, _moved(signal_BTD, kept.signal_BTD)),
            moves_BM=noted(kept.moves_BM, _moved(residual_BTD, kept.residual_BTD)),
        )


def _lengths(x_BTD: jax.Array) -> jax.Array:
    return jnp.linalg.norm(x_BTD.astype(jnp.float32), axis=-1)


def _moved(new_BTD: jax.Array, old_BTD: jax.Array) -> jax.Array:
    """sum |new - old| / sum |old| of each row, float32; infinite of zeros."""
    new_BTD, old_BTD = new_BTD.astype(jnp.float32), old_BTD.astype(jnp.float32)
    axes = tuple(range(1, new_BTD.ndim))
    return jnp.mean(jnp.abs(new_BTD - old_BTD), axes) / jnp.mean(jnp.abs(old_BTD), axes)
