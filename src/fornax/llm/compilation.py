"""What an engine compiles: each program's function, the shapes it takes, what it may overwrite.

Shapes come from arrays on the device, or from a description of them (`describe_arrays`), so that
the programs of an engine can be compiled where neither its weights nor its devices are.

Legend: T tokens of the bucket, M samples of the bucket, R rows (sequences that can run at once),
D model width, V vocabulary, W words of an allowed-token bitmask, K log probabilities a token.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fornax import kernels
from fornax.llm.buckets import buckets, fours, powers
from fornax.llm.config import LogprobsMode
from fornax.llm.limits import Limits
from fornax.llm.masks import mask_words
from fornax.llm.rejection import Proposals, init_proposals
from fornax.llm.sampler import (
    RowParams,
    Sampled,
    SamplerState,
    init_sampler_state,
    load_row,
    propose,
    sample,
    score,
)
from fornax.llm.step import Bind, StepLayout, change_tables, make_step, placed
from fornax.llm.weights import Weights
from fornax.models import cache_windows, describe_pages

__all__ = [
    "CHANGES",
    "COPIES",
    "POOLED",
    "SCORED",
    "Arrays",
    "Program",
    "Sizes",
    "abstract",
    "describe_arrays",
    "make_programs",
]

COPIES = 16
"""Page copies of one call; more take several."""
CHANGES = 1024
"""Changes of each page table in one call; more take several."""
SCORED = 32
"""Prompt tokens scored by one call."""
POOLED = 8
"""Hidden rows read by one call."""


@dataclass(frozen=True)
class Sizes:
    """The sizes that programs are compiled for."""

    steps: tuple[int, ...]
    """Tokens of a step."""
    samples: tuple[int, ...]
    """Samples of a step."""
    layouts: dict[int, StepLayout]
    """The vector of a step, by its tokens."""

    @classmethod
    def of(
        cls, weights: Weights, limits: Limits, drafts: int = 0, *, coarse: bool = False
    ) -> "Sizes":
        """Those of an engine.

        Args:
          weights: the model's.
          limits: the engine's.
          drafts: tokens proposed for a sequence at a time, at most.
          coarse: whether to compile few sizes, see `EngineConfig.step_sizes`.
        """
        rows, most = limits.max_num_seqs, limits.max_num_batched_tokens
        steps = fours(most) if coarse else buckets(most)
        samples = min(rows * (1 + drafts), most)
        groups = len(cache_windows(weights.config))
        return cls(
            steps,
            fours(samples) if coarse else powers(samples),
            {n: StepLayout(n, min(n, rows), _changes(n, limits), groups) for n in steps},
        )


def _changes(tokens: int, limits: Limits) -> int:
    """Most changes of a page table that `tokens` tokens of running sequences cause: pages that they
    begin, and as many that leave a window."""
    return 2 * (tokens // limits.page_size + min(tokens, limits.max_num_seqs))


@dataclass(frozen=True)
class Arrays:
    """What an engine keeps on its devices between steps; here as shapes."""

    state: Any
    """The weights, with adapters if there are any."""
    kv: tuple[Any, ...]
    """The cache's pages, an array for each group."""
    tables: tuple[Any, ...]
    """The page table of each group: int32 [R, W]."""
    hidden: Any
    """The last step's final hidden states: [most tokens, D]."""
    sampler: SamplerState
    masks: dict[int, Any]
    """For each number of samples the bitmask that allows everything: uint32 [M, W]."""
    proposals: Proposals | None = None
    """What a draft model proposes; None without one."""


def describe_arrays(weights: Weights, limits: Limits, sizes: Sizes, places: int = 0) -> Arrays:
    """The shapes of what an engine keeps, none of it made.

    Args:
      weights: the model's.
      limits: the engine's.
      sizes: to compile for.
      places: proposals of a draft model that a row has room for; 0 without one.
    """
    model, where = weights.config, weights.placement
    pages = describe_pages(
        model,
        limits.num_pages,
        limits.page_size,
        limits.cache_dtype,
        where.mesh,
        heads=limits.cache_heads,
    )
    rows = limits.max_num_seqs
    sampler = jax.eval_shape(lambda: init_sampler_state(rows, model.vocab_size))
    proposals = None
    if places:
        proposals = jax.eval_shape(lambda: init_proposals(rows, places, model.vocab_size))
    words = mask_words(model.vocab_size)

    def put(shape: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=where.everywhere)

    table = jax.ShapeDtypeStruct((limits.max_num_seqs, limits.table_width), jnp.int32)
    hidden = (limits.max_num_batched_tokens, model.hidden_size)
    return Arrays(
        state=weights.state,
        kv=tuple(one if one.sharding is not None else put(one) for one in pages),
        tables=(put(table),) * len(pages),
        hidden=put(jax.ShapeDtypeStruct(hidden, where.compute_dtype)),
        sampler=jax.tree.map(put, sampler),
        masks={n: put(jax.ShapeDtypeStruct((n, words), jnp.uint32)) for n in sizes.samples},
        proposals=jax.tree.map(put, proposals),
    )


def abstract(tree: Any) -> Any:
    """The shapes, dtypes and shardings of arrays."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), tree
    )


@dataclass(frozen=True)
class Program:
    """A function with the shapes that it is compiled for."""

    weights: Weights
    """Whose arrays are not among these."""
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    donated: tuple[int, ...] = ()
    """Arguments whose memory the results may take."""
    results: Any = None
    """Where results lie, over a mesh: where the next step wants them; None for everywhere."""

    def lower(self) -> jax.stages.Lowered:
        """Trace it, for its devices' compiler."""
        everywhere = self.weights.placement.everywhere
        where: dict[str, Any] = {}
        if everywhere is not None:
            where["out_shardings"] = self.results or everywhere
        with placed(self.weights):
            jitted = jax.jit(self.function, donate_argnums=self.donated, **where)
            return jitted.lower(*self.arguments)

    def compile(self) -> jax.stages.Compiled:
        """Compile ahead of time."""
        with placed(self.weights):
            return self.lower().compile()


def make_programs(
    weights: Weights,
    limits: Limits,
    sizes: Sizes,
    arrays: Arrays,
    *,
    max_logprobs: int,
    logprobs_mode: LogprobsMode = "raw_logprobs",
    proposes: bool = False,
    bind: Bind | None = None,
) -> dict[tuple[Any, ...], Program]:
    """All programs of an engine, the largest steps first.

    A program takes the leaves of the state rather than the state: to take it apart at every call
    would cost as much as the call itself.

    Args:
      weights: the model's; its arrays are not kept.
      limits: the engine's.
      sizes: to compile for.
      arrays: shapes of what is on the devices.
      max_logprobs: K, at most.
      logprobs_mode: of which distribution, see `EngineConfig`.
      proposes: whether these are the weights of the draft model.
      bind: gives weights with adapters each token's adapter; None without adapters.

    Returns:
      By key: ("step", T), ("sample", M), ("load row",), ("copy pages", group),
      ("change tables",), ("pool",), ("score",); of a draft model ("propose", M) for ("sample", M).
    """
    vocab = weights.config.vocab_size
    most = min(max_logprobs, vocab)
    weights = replace(weights, state=None)
    everywhere = weights.placement.everywhere
    leaves, tree = jax.tree.flatten(arrays.state)
    kv, tables, hidden, sampler = arrays.kv, arrays.tables, arrays.hidden, arrays.sampler

    def ints(shape: tuple[int, ...], dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=everywhere)

    def on_leaves(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def taking_leaves(leaves: Any, *rest: Any) -> Any:
            return function(tree.unflatten(leaves), *rest)

        return taking_leaves

    def logits(state: Any, x_MD: jax.Array) -> jax.Array:
        return weights.merge(state).logits(x_MD[None])[0]

    def choose(
        state: Any,
        hidden: jax.Array,
        sampler: SamplerState,
        vector: jax.Array,
        mask: Any,
        proposals: Proposals | None,
    ) -> tuple[Sampled, SamplerState]:
        places_M, rows_M, positions_M = vector[0], vector[1], vector[2]
        logits_MV = logits(state, hidden[jnp.maximum(places_M, 0)])
        wanted = vector[3, 0] > 0
        return sample(
            logits_MV,
            sampler,
            rows_M,
            positions_M,
            mask,
            num_logprobs=most,
            want_logprobs=wanted,
            logprobs_mode=logprobs_mode,
            proposals=proposals,
            slots_M=vector[4],
        )

    def draft(
        state: Any,
        hidden: jax.Array,
        sampler: SamplerState,
        proposals: Proposals,
        vector: jax.Array,
    ) -> tuple[jax.Array, SamplerState, Proposals]:
        logits_MV = logits(state, hidden[jnp.maximum(vector[0], 0)])
        return propose(logits_MV, sampler, proposals, vector[1], vector[2], vector[4])

    def score_rows(state: Any, hidden: jax.Array, vector: jax.Array) -> Any:
        logits_MV = logits(state, hidden[jnp.maximum(vector[0], 0)])
        return score(logits_MV, jnp.maximum(vector[1], 0), most)

    found: dict[tuple[Any, ...], Program] = {}
    places = (tuple(pages.sharding for pages in kv), everywhere, everywhere)
    for size, layout in reversed(sizes.layouts.items()):
        step = on_leaves(make_step(weights, layout, limits.max_model_len, bind))
        args = (leaves, kv, tables, hidden, sampler.last_token, ints((layout.size,)))
        found["step", size] = Program(weights, step, args, (1, 2, 3), places)
    for size in sizes.samples:
        vector = ints((5, size))
        if proposes:
            args = (leaves, hidden, sampler, arrays.proposals, vector)
            found["propose", size] = Program(weights, on_leaves(draft), args, (2, 3))
            continue
        mask = ints((size, mask_words(vocab)), jnp.uint32)
        args = (leaves, hidden, sampler, vector, mask, arrays.proposals)
        found["sample", size] = Program(weights, on_leaves(choose), args, (2,))
    row = jax.tree.map(np.asarray, RowParams.default(vocab))
    args = (sampler, ints(()), jax.tree.map(lambda x: ints(x.shape, x.dtype), row))
    found["load row",] = Program(weights, load_row, args, (0,))
    for group, pages in enumerate(kv):
        args = (pages, ints((2, COPIES)))
        found["copy pages", group] = Program(weights, _copy_pages, args, (0,), pages.sharding)
    changes = (ints((3, CHANGES)),) * len(tables)
    found["change tables",] = Program(weights, change_tables, (tables, changes), (0,))
    found["pool",] = Program(weights, _pool_rows, (hidden, ints((POOLED,))))
    args = (leaves, hidden, ints((2, SCORED)))
    found["score",] = Program(weights, on_leaves(score_rows), args)
    return found


def _copy_pages(kv_LPSCH: jax.Array, pairs: jax.Array) -> jax.Array:
    return kernels.copy_pages(kv_LPSCH, pairs[0], pairs[1])


def _pool_rows(hidden: jax.Array, places: jax.Array) -> jax.Array:
    """Unit vectors: the final norm's output at each place."""
    x_MD = hidden[places].astype(jnp.float32)
    return x_MD / jnp.maximum(jnp.linalg.norm(x_MD, axis=-1, keepdims=True), 1e-12)
