"""The one step of the model: a ragged batch through the paged cache.

All that the host tells the device about a step travels as one int32 vector, cut up inside.

Legend: T tokens of the bucket, R sequences of the bucket, W pages of a table, D model width.
"""

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fornax.llm.weights import Weights
from fornax.mesh import use_mesh
from fornax.models import Decoder, PagedCache, PageTables, cache_windows

__all__ = ["StepLayout", "make_step", "placed"]

Bind = Callable[[Any, jax.Array], Any]
"""(state, adapters_T) to a state whose weights know each token's adapter."""


@dataclass(frozen=True)
class StepLayout:
    """Names and shapes of the parts of a step's vector, in order."""

    tokens: int
    """T."""
    rows: int
    """R."""
    table_width: int
    """W."""
    groups: int

    @property
    def parts(self) -> dict[str, tuple[int, ...]]:
        """Shape of each part."""
        shapes: dict[str, tuple[int, ...]] = {
            "tokens_T": (self.tokens,),
            "positions_T": (self.tokens,),
            "source_T": (self.tokens,),
            "adapters_T": (self.tokens,),
            "query_start_R1": (self.rows + 1,),
            "context_lens_R": (self.rows,),
        }
        for group in range(self.groups):
            shapes[f"slots_T.{group}"] = (self.tokens,)
            shapes[f"page_table_RW.{group}"] = (self.rows, self.table_width)
        return shapes

    @property
    def size(self) -> int:
        """Length of the vector."""
        return sum(math.prod(shape) for shape in self.parts.values())

    def cut(self, vector: Any) -> dict[str, Any]:
        """The parts of a vector; of a numpy vector these are views to write to."""
        found, start = {}, 0
        for name, shape in self.parts.items():
            stop = start + math.prod(shape)
            found[name] = vector[start:stop].reshape(shape)
            start = stop
        return found

    def empty(self) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """A vector in which every token is padding, and its parts."""
        vector = np.zeros(self.size, np.int32)
        parts = self.cut(vector)
        parts["source_T"].fill(-1)
        parts["adapters_T"].fill(-1)
        return vector, parts


def make_step(
    weights: Weights, layout: StepLayout, longest: int, bind: Bind | None
) -> Callable[..., Any]:
    """The step for one bucket, to be compiled.

    Args:
      weights: the model's.
      layout: the bucket's.
      longest: the longest sequence served, for rope scalings that depend on it.
      bind: gives weights with adapters each token's adapter; None without adapters.

    Returns:
      A function of (state, kv, hidden [most tokens, D], last_token [rows], vector) that returns
      the new (kv, hidden): pages written, and the final norm's output of the step's tokens in the
      first T rows. A token whose source is a row takes that row's last sampled token.
    """
    windows = cache_windows(weights.config)

    def step(
        state: Any, kv: Any, hidden: jax.Array, last_token: jax.Array, vector: jax.Array
    ) -> tuple[Any, jax.Array]:
        parts = layout.cut(vector)
        source_T = parts["source_T"]
        sampled_T = last_token[jnp.maximum(source_T, 0)]
        tokens_T = jnp.where(source_T >= 0, sampled_T, parts["tokens_T"])
        cache = PagedCache(
            kv=kv,
            tables=tuple(
                PageTables(parts[f"page_table_RW.{group}"], parts[f"slots_T.{group}"])
                for group in range(layout.groups)
            ),
            query_start_R1=parts["query_start_R1"],
            context_lens_R=parts["context_lens_R"],
            windows=windows,
        )
        if bind is not None:
            state = bind(state, parts["adapters_T"])
        model: Decoder = weights.merge(state)
        with placed(weights):
            x_TD, cache = model.paged(tokens_T, parts["positions_T"], cache, longest=longest)
        hidden = jax.lax.dynamic_update_slice(hidden, x_TD.astype(hidden.dtype), (0, 0))
        return cache.kv, hidden

    return step


def placed(weights: Weights) -> contextlib.AbstractContextManager[None]:
    """The mesh context that functions of these weights are traced in."""
    where = weights.placement
    if where.mesh is None:
        return contextlib.nullcontext()
    return use_mesh(where.mesh, where.rules)
