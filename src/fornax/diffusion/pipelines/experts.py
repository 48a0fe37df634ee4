"""Two networks as one denoiser, each for a part of the times."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from fornax.diffusion.models.condition import Condition

__all__ = ["Experts"]


class Experts(nnx.Module):
    """A mixture of two experts by the noise that is left (Wan 2.2, Wan Team 2025).

    Attributes:
      early: the network of times of at least the boundary.
      late: of those below.
      boundary: 0 to 1000.
    """

    def __init__(self, early: Any, late: Any, boundary: float):
        """Put them together; both take and give the same."""
        self.early, self.late, self.boundary = early, late, boundary
        self.config = early.config

    def __call__(self, x_BX: jax.Array, time_B: jax.Array, condition: Condition) -> jax.Array:
        """Each row by the network of its time; one that no row needs does not run."""
        is_early_B = time_B >= self.boundary

        def run(network: Any, needed: jax.Array) -> jax.Array:
            graph, state = nnx.split(network)
            return jax.lax.cond(
                needed,
                lambda state, *given: nnx.merge(graph, state)(*given),
                lambda state, x_BX, *rest: jnp.zeros(
                    (*x_BX.shape[:-1], self.config.outputs), x_BX.dtype
                ),
                *(state, x_BX, time_B, condition),
            )

        early_BX = run(self.early, jnp.any(is_early_B))
        late_BX = run(self.late, jnp.any(~is_early_B))
        rows = is_early_B.reshape(-1, *(1,) * (x_BX.ndim - 1))
        return jnp.where(rows, early_BX, late_BX)
