"""Where the sequences of a ragged batch lie, and which slots hold what they continue from.

Legend: T tokens, U sequences, L layers, A slots, J slots that a sequence writes.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fornax.config.errors import KernelError

__all__ = ["SlotRows"]


class SlotRows(NamedTuple):
    """As `ragged_gated_delta_rule` takes them."""

    starts_U1: jax.Array
    slots_U: jax.Array
    kept_UJ: jax.Array
    fresh_U: jax.Array
    layer: jax.Array

    @classmethod
    def even(cls, tokens: int, rows: int, kept: int) -> "SlotRows":
        """Sequences of equally many tokens that continue, each from a slot of its own, in the
        second of two layers: what benchmarks run on."""
        slots_UJ = jnp.arange(rows * kept, dtype=jnp.int32).reshape(rows, kept)
        starts_U1 = jnp.arange(rows + 1, dtype=jnp.int32) * tokens // rows
        return cls(starts_U1, slots_UJ[:, 0], slots_UJ, jnp.zeros(rows, bool), jnp.int32(1))

    @property
    def counts(self) -> jax.Array:
        """Tokens of each, [U]."""
        return self.starts_U1[1:] - self.starts_U1[:-1]

    def held(self, stack_LA: jax.Array) -> jax.Array:
        """[U, ...]: what each sequence's slot holds; 0 where the sequence begins.

        As a condition it is read in one place, before it is written: then XLA copies no slots.
        """
        shape = (len(self.slots_U), *stack_LA.shape[2:])
        held_U = jax.lax.cond(
            jnp.all(self.fresh_U),
            lambda: jnp.zeros(shape, stack_LA.dtype),
            lambda: stack_LA[self.layer, self.slots_U],
        )
        return jnp.where(self.fresh_U.reshape(-1, *(1,) * (stack_LA.ndim - 2)), 0, held_U)

    def check(
        self, name: str, beside: str, wanted: Mapping[str, tuple[jax.Array | None, tuple[int, ...]]]
    ) -> None:
        """Check these arrays, and those of an operation against the shapes that they must have.

        Raises:
          KernelError: one has another shape.
        """
        if self.kept_UJ.ndim != 2:
            raise KernelError(f"{name}: kept{self.kept_UJ.shape} must be [U, J]")
        U = self.kept_UJ.shape[0]
        own = {
            "query_start": (self.starts_U1, (U + 1,)),
            "slots": (self.slots_U, (U,)),
            "fresh": (self.fresh_U, (U,)),
        }
        for argument, (array, shape) in {**wanted, **own}.items():
            if array is not None and array.shape != shape:
                raise KernelError(
                    f"{name}: {argument}{array.shape} must be {shape} beside {beside} and "
                    f"kept{self.kept_UJ.shape}"
                )
