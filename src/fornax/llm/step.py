"""The one step of the model: a ragged batch through the paged cache.

All that the host tells the device about a step travels as one int32 vector, cut up inside. The page
tables stay on the device; the vector brings what changed in them.

Legend: T tokens of the bucket, R sequences of the bucket, A rows of the engine, W pages of a table,
U changes of a table, S slots of a page, J slots that a sequence's states go to, D model width.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fornax import kernels
from fornax.llm.weights import Weights
from fornax.mesh import use_mesh
from fornax.models import (
    CacheHeads,
    Decoder,
    DeltaState,
    PagedCache,
    PageTables,
    StateSlots,
    cache_windows,
)

__all__ = [
    "NO_ROW",
    "StepLayout",
    "StepResults",
    "change_tables",
    "make_draft",
    "make_step",
    "parts_later",
    "placed",
]

NO_ROW = np.iinfo(np.int32).max
"""Where a list is filled up: a row that no page table has, a slot that no state has."""

Bind = Callable[[nnx.State, jax.Array], nnx.State]
"""(state, adapters_T) to a state whose weights know each token's adapter."""

Pages = tuple[kernels.Pages, ...]
Tables = tuple[jax.Array, ...]
"""The page table of each group, int32 [A, W]; 0 where there is no page."""


StepResults = tuple[Pages, DeltaState | None, Tables, jax.Array, jax.Array | None]
"""kv, states and tables after a step, its tokens' hidden states and the experts that they took."""

Vector = TypeVar("Vector", jax.Array, np.ndarray)


@dataclass(frozen=True)
class StepLayout:
    """Names and shapes of the parts of a step's vector, in order."""

    tokens: int
    """T."""
    rows: int
    """R."""
    changes: int
    """U, of each group's page table; what is more goes ahead of the step by itself."""
    groups: int
    states: int = 0
    """J, slots that take states of a sequence; 0 where no layer keeps any."""

    @functools.cached_property
    def parts(self) -> dict[str, tuple[int, ...]]:
        """Shape of each part."""
        shapes: dict[str, tuple[int, ...]] = {
            "tokens_T": (self.tokens,),
            "positions_T": (self.tokens,),
            "source_T": (self.tokens,),
            "adapters_T": (self.tokens,),
            "rows_T": (self.tokens,),
            "rows_R": (self.rows,),
            "query_start_R1": (self.rows + 1,),
            "context_lens_R": (self.rows,),
        }
        if self.states:
            shapes |= {"slots_R": (self.rows,), "kept_RJ": (self.rows, self.states)}
        for group in range(self.groups):
            shapes[f"changes_3U.{group}"] = (3, self.changes)
        return shapes

    @functools.cached_property
    def size(self) -> int:
        """Length of the vector."""
        return sum(math.prod(shape) for shape in self.parts.values())

    def cut(self, vector: Vector) -> dict[str, Vector]:
        """The parts of a vector; of a numpy vector these are views to write to."""
        found, start = {}, 0
        for name, shape in self.parts.items():
            stop = start + math.prod(shape)
            found[name] = vector[start:stop].reshape(shape)
            start = stop
        return found

    def empty(self) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """A vector in which every token is padding, and its parts."""
        vector = self._padding.copy()
        return vector, self.cut(vector)

    @functools.cached_property
    def _padding(self) -> np.ndarray:
        vector = np.zeros(self.size, np.int32)
        parts = self.cut(vector)
        parts["source_T"].fill(-1)
        parts["adapters_T"].fill(-1)
        parts["rows_T"].fill(-1)
        if self.states:
            parts["kept_RJ"].fill(NO_ROW)
        for group in range(self.groups):
            parts[f"changes_3U.{group}"].fill(NO_ROW)
        return vector


def make_step(
    weights: Weights,
    layout: StepLayout,
    longest: int,
    heads: tuple[CacheHeads, ...],
    bind: Bind | None,
    *,
    returns_experts: bool = False,
) -> Callable[..., StepResults]:
    """The step for one bucket, to be compiled.

    Args:
      longest: the longest sequence served, for rope scalings that depend on it.
      heads: that the cache holds in each group.
      bind: gives weights with adapters each token's adapter; None without adapters.
      returns_experts: whether it returns the experts that tokens took.

    Returns:
      A function of (state, kv, states, tables, last_token [A], parts) that returns the new (kv,
      states, tables): pages and rows' states written, page tables changed; the final norm's output,
      [T, D]; and the experts of `Decoder.paged_and_experts`, or None. `parts` is the step's vector,
      cut by its layout. A token whose source is a row takes that row's last sampled token.
    """
    windows = cache_windows(weights.config)

    def step(
        state: nnx.State,
        kv: Pages,
        states: DeltaState | None,
        tables: Tables,
        last_token: jax.Array,
        parts: dict[str, jax.Array],
    ) -> StepResults:
        source_T = parts["source_T"]
        sampled_T = last_token[jnp.maximum(source_T, 0)]
        tokens_T = jnp.where(source_T >= 0, sampled_T, parts["tokens_T"])
        tables = change_tables(
            tables, [parts[f"changes_3U.{group}"] for group in range(layout.groups)]
        )
        cache = PagedCache(
            kv=kv,
            tables=tuple(
                _of_step(table_AW, pages.shape[2], parts)
                for table_AW, pages in zip(tables, kv, strict=True)
            ),
            query_start_R1=parts["query_start_R1"],
            context_lens_R=parts["context_lens_R"],
            windows=windows,
            heads=heads,
            states=None if states is None else _slots_of_step(states, parts),
        )
        if bind is not None:
            state = bind(state, parts["adapters_T"])
        model: Decoder = weights.merge(state)
        with placed(weights):
            args, experts_TLk = (tokens_T, parts["positions_T"], cache), None
            if returns_experts:
                x_TD, cache, experts_TLk = model.paged_and_experts(*args, longest=longest)
            else:
                x_TD, cache = model.paged(*args, longest=longest)
        x_TD = x_TD.astype(weights.placement.compute_dtype)
        states = None if cache.states is None else cache.states.stacks
        return cache.kv, states, tables, x_TD, experts_TLk

    return step


def parts_later(parts: dict[str, jax.Array], steps: jax.Array) -> dict[str, jax.Array]:
    """A step's parts `steps` (int32) steps later, where each of its tokens is its sequence's last
    and the next one is what was sampled from it."""
    lens_R = parts["context_lens_R"]
    return parts | {
        "positions_T": parts["positions_T"] + steps,
        "source_T": jnp.where(steps > 0, parts["rows_T"], parts["source_T"]),
        "context_lens_R": jnp.where(lens_R > 0, lens_R + steps, 0),
    }


def make_draft(
    weights: Weights,
    layout: StepLayout,
    longest: int,
    heads: tuple[CacheHeads, ...],
    count: int,
) -> Callable[..., tuple[Pages, jax.Array]]:
    """What the model's module for multi-token prediction does after a step, to be compiled.

    Args:
      layout: of the step.
      longest: see `make_step`.
      heads: see `make_step`.
      count: tokens to propose, K.

    Returns:
      A function of (state, kv, tables, hidden [most tokens, D], vector, ends) that returns the
      new kv and tokens proposed, int32 [R, K]. The vector is the step's, with the token after each
      in place of each token, and no row where it is not known; `ends` is int32 [2, R], the
      place of each sequence's last token in the step, below 0 where nothing is to be proposed, and
      how many tokens its pages have places for: beyond them a page table may hold another's. First
      the module writes its keys and values of all the step's tokens; then it continues from each
      last one, from its own output and by its own most likely tokens, whose keys and values the
      next step writes again.
    """
    windows = cache_windows(weights.config)

    def draft(
        state: nnx.State,
        kv: Pages,
        tables: Tables,
        hidden: jax.Array,
        vector: jax.Array,
        ends: jax.Array,
    ) -> tuple[Pages, jax.Array]:
        parts = layout.cut(vector)
        last_R, places_R = ends
        model: Decoder = weights.merge(state)

        def run(
            kv: Pages, x_TD: jax.Array, tokens_T: jax.Array, parts: dict[str, jax.Array]
        ) -> tuple[Pages, jax.Array]:
            of_step = [
                _of_step(table_AW, pages.shape[2], parts)
                for table_AW, pages in zip(tables, kv, strict=True)
            ]
            starts_R1, lens_R = parts["query_start_R1"], parts["context_lens_R"]
            cache = PagedCache(kv, tuple(of_step), starts_R1, lens_R, windows, heads)
            positions_T = parts["positions_T"]
            x_TD, cache = model.paged_ahead(x_TD, tokens_T, positions_T, cache, longest=longest)
            return cache.kv, x_TD

        with placed(weights):
            x_TD = hidden[: layout.tokens].astype(weights.placement.compute_dtype)
            kv, x_TD = run(kv, x_TD, parts["tokens_T"], parts)
            at_R = jnp.maximum(last_R, 0)
            x_RD, position_R = x_TD[at_R], parts["positions_T"][at_R]
            found: list[jax.Array] = []
            while True:
                logits_RV = model.logits(x_RD[None])[0]
                found.append(jnp.maximum(kernels.argmax(logits_RV), 0))
                if len(found) == count:
                    return kv, jnp.stack(found, axis=1)
                position_R = position_R + 1
                writes_R = (last_R >= 0) & (position_R < places_R)
                single = {
                    "rows_R": parts["rows_R"],
                    "rows_T": jnp.where(writes_R, parts["rows_R"], -1),
                    "positions_T": position_R,
                    "query_start_R1": jnp.arange(layout.rows + 1, dtype=jnp.int32),
                    "context_lens_R": position_R + 1,
                }
                kv, x_RD = run(kv, x_RD, found[-1], single)

    return draft


def change_tables(tables: Tables, changes: Sequence[jax.Array]) -> Tables:
    """Write changes into page tables; in place where these are donated.

    Args:
      tables: int32 [A, W], of each group.
      changes: int32 [3, U], of each group: row, index, page; no two of one row and index, and
        `NO_ROW` for none.
    """
    return tuple(
        table_AW.at[change_3U[0], change_3U[1]].set(change_3U[2], mode="drop")
        for table_AW, change_3U in zip(tables, changes, strict=True)
    )


def _of_step(table_AW: jax.Array, page_size: int, parts: dict[str, jax.Array]) -> PageTables:
    """A group's page table as the step's sequences need it, and where its tokens are written."""
    row_T, position_T = parts["rows_T"], parts["positions_T"]
    page_T = table_AW[row_T, position_T // page_size]
    slots_T = jnp.where(row_T < 0, 0, page_T * page_size + position_T % page_size)
    return PageTables(table_AW[parts["rows_R"]], slots_T)


def _slots_of_step(states: DeltaState, parts: dict[str, jax.Array]) -> StateSlots:
    """The states as the step's sequences need them; a sequence's first token is at 0."""
    starts_R1 = parts["query_start_R1"]
    fresh_R = parts["context_lens_R"] == starts_R1[1:] - starts_R1[:-1]
    return StateSlots(states, parts["slots_R"], parts["kept_RJ"], starts_R1, fresh_R)


def placed(weights: Weights) -> contextlib.AbstractContextManager[None]:
    """The mesh context that functions of these weights are traced in."""
    where = weights.placement
    if where.mesh is None:
        return contextlib.nullcontext()
    return use_mesh(where.mesh, where.rules)
