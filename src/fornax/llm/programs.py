"""What an engine compiles: each program's function, the shapes it takes, what it may overwrite.

Shapes come from arrays on the device, or from a description of them (`describe_arrays`), so that
the programs of an engine can be compiled where neither its weights nor its devices are.

Legend: T tokens of the bucket, M samples of the bucket, R rows (sequences that can run at once),
D model width, V vocabulary, W words of an allowed-token bitmask, K log probabilities a token.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from fornax import kernels
from fornax.llm.config import EngineConfig, LogprobsMode
from fornax.llm.limits import Limits
from fornax.llm.routed_experts import describe_routed_experts
from fornax.llm.sampling.masks import full_mask, mask_words
from fornax.llm.sampling.rejection import Proposals, init_proposals
from fornax.llm.sampling.sampler import Sampled, Scored, propose, sample, score
from fornax.llm.sampling.state import RowParams, SamplerState, init_sampler_state, load_row
from fornax.llm.step import (
    Bind,
    StepLayout,
    StepResults,
    change_tables,
    make_draft,
    make_step,
    parts_later,
    placed,
)
from fornax.llm.weights import Weights
from fornax.models import DeltaState, cache_windows, copy_states, describe_pages, describe_states

__all__ = [
    "CHANGES",
    "COPIES",
    "POOLED",
    "SCORED",
    "Arrays",
    "Program",
    "Sizes",
    "bucket_for",
    "buckets",
    "describe_arrays",
    "make_programs",
    "powers_of_four",
    "powers_of_two",
]

COPIES = 16
"""Copies of pages, or of states, of one call; more take several."""
CHANGES = 1024
"""Changes of each page table in one call; more take several."""
SCORED = 32
"""Prompt tokens scored by one call."""
POOLED = 8
"""Hidden rows read by one call."""


Shape = jax.ShapeDtypeStruct
T = TypeVar("T")


@dataclass(frozen=True)
class Sizes:
    """The sizes that programs are compiled for."""

    steps: tuple[int, ...]
    """Tokens of a step."""
    samples: tuple[int, ...]
    """Samples of a step."""
    decodes: tuple[int, ...]
    """Tokens of a step that is sampled in the same program; none with drafts."""
    layouts: dict[int, StepLayout]
    """The vector of a step, by its tokens."""

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        weights: Weights,
        limits: Limits,
        *,
        draft: bool = False,
        apart: bool = False,
    ) -> "Sizes":
        """Those of an engine's model, or of its draft model; `apart` where every step is sampled by
        a program of its own."""
        rows, most = limits.max_num_seqs, limits.max_num_batched_tokens
        coarse = config.step_sizes == "coarse"
        steps = powers_of_four(most) if coarse else buckets(most)
        samples = min(rows * (1 if draft else 1 + config.num_drafts), most)
        groups = len(cache_windows(weights.config))
        decodes: set[int] = set()
        if not draft and not apart and not config.num_drafts:
            decodes = {bucket_for(count, steps) for count in powers_of_two(samples)}
        found = powers_of_two(samples)
        if coarse:
            found = powers_of_four(samples)
        elif decodes:  # which leave few steps to sample apart
            found = tuple(sorted({1, *powers_of_four(samples)}))
        return cls(
            steps,
            found,
            tuple(sorted(decodes)),
            {
                n: StepLayout(n, min(n, rows), _changes(n, limits), groups, limits.state_versions)
                for n in steps
            },
        )


def _changes(tokens: int, limits: Limits) -> int:
    """Most changes of a page table that `tokens` tokens of running sequences cause: pages that they
    begin, and as many that leave a window."""
    return 2 * (tokens // limits.page_size + min(tokens, limits.max_num_seqs))


@dataclass(frozen=True)
class Arrays:
    """What an engine keeps on its devices between steps; here as shapes."""

    state: nnx.State
    """The weights, with adapters if there are any."""
    kv: tuple[kernels.Pages, ...]
    """The cache's pages, of each group."""
    states: DeltaState | None
    """The states of linear layers, in slots; None where there are none."""
    tables: tuple[Shape, ...]
    """The page table of each group: int32 [R, W]."""
    hidden: Shape
    """The last step's final hidden states: [most tokens, D]."""
    sampler: SamplerState
    masks: dict[int, Shape]
    """For each number of samples the bitmask that allows everything: uint32 [M, W]."""
    proposals: Proposals | None = None
    """What a draft model proposes; None without one."""


def describe_arrays(weights: Weights, limits: Limits, sizes: Sizes, places: int = 0) -> Arrays:
    """The shapes of what an engine keeps, none of it made.

    Args:
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
    states = describe_states(model, limits.num_state_slots, where.compute_dtype, where.mesh)
    sampler = jax.eval_shape(lambda: init_sampler_state(rows, model.vocab_size))
    proposals = None
    if places:
        proposals = jax.eval_shape(lambda: init_proposals(rows, places, model.vocab_size))
    words = mask_words(model.vocab_size)

    def put(shape: jax.Array | Shape) -> jax.ShapeDtypeStruct:
        if isinstance(shape, jax.ShapeDtypeStruct) and shape.sharding is not None:
            return shape
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=where.everywhere)

    table = jax.ShapeDtypeStruct((limits.max_num_seqs, limits.table_width), jnp.int32)
    hidden = (limits.max_num_batched_tokens, model.hidden_size)
    return Arrays(
        state=weights.state,
        kv=jax.tree.map(put, pages),
        states=jax.tree.map(put, states),
        tables=(put(table),) * len(pages),
        hidden=put(jax.ShapeDtypeStruct(hidden, where.compute_dtype)),
        sampler=jax.tree.map(put, sampler),
        masks={n: put(jax.ShapeDtypeStruct((n, words), jnp.uint32)) for n in sizes.samples},
        proposals=jax.tree.map(put, proposals),
    )


@dataclass(frozen=True)
class Program:
    """A function with the shapes that it is compiled for."""

    weights: Weights
    """Whose arrays are not among these."""
    function: Callable[..., object]
    arguments: tuple[object, ...]
    donated: tuple[int, ...] = ()
    """Arguments whose memory the results may take."""
    results: object = None
    """Where results lie, over a mesh: where the next step needs them; None for everywhere."""

    def lower(self) -> jax.stages.Lowered:
        """Trace it, for its devices' compiler."""
        everywhere = self.weights.placement.everywhere
        jit = functools.partial(jax.jit, self.function, donate_argnums=self.donated)
        if everywhere is not None:
            jit = functools.partial(jit, out_shardings=self.results or everywhere)
        with placed(self.weights):
            return jit().lower(*self.arguments)

    def compile(self) -> jax.stages.Compiled:
        """Compile ahead of time."""
        with placed(self.weights):
            return self.lower().compile()


@dataclass(frozen=True)
class _Functions:
    """What programs compute with the weights.

    They take the leaves of the state rather than the state: to take it apart at every call would
    cost as much as the call itself.
    """

    weights: Weights
    """Without arrays."""
    tree: jax.tree_util.PyTreeDef
    """Of the state."""
    most: int
    """Log probabilities a token, K."""
    logprobs_mode: LogprobsMode

    def on_leaves(self, function: Callable[..., T]) -> Callable[..., T]:
        """A function of the state as one of its leaves."""

        @functools.wraps(function)
        def taking_leaves(leaves: list[jax.Array], *rest: object) -> T:
            return function(self.tree.unflatten(leaves), *rest)

        return taking_leaves

    def choose(
        self,
        leaves: list[jax.Array],
        hidden: jax.Array,
        sampler: SamplerState,
        vector: jax.Array,
        mask: jax.Array,
        proposals: Proposals | None,
    ) -> tuple[Sampled, SamplerState]:
        """A token for each sample; `vector` is int32 [5, M]: place in `hidden`, row, position,
        whether log probabilities are wanted (the first), and place among the row's proposals."""
        return sample(
            self._logits_at(leaves, hidden, vector[0]),
            sampler,
            vector[1],
            vector[2],
            mask,
            num_logprobs=self.most,
            want_logprobs=vector[3, 0] > 0,
            logprobs_mode=self.logprobs_mode,
            proposals=proposals,
            slots_M=vector[4],
        )

    def forward(
        self, step: Callable[..., StepResults], layout: StepLayout
    ) -> Callable[..., StepResults]:
        """A step whose hidden states are kept, to be sampled, scored or pooled by other programs.

        Args:
          step: from `make_step`, as a function of the leaves.
          layout: of the step.

        Returns:
          A function of (leaves, kv, states, tables, hidden [most tokens, D], last_token, vector)
          that returns what the step does, with its tokens' hidden states in the first rows of
          `hidden`.
        """

        def forward(
            leaves: list[jax.Array],
            kv: tuple[kernels.Pages, ...],
            states: DeltaState | None,
            tables: tuple[jax.Array, ...],
            hidden: jax.Array,
            last_token: jax.Array,
            vector: jax.Array,
        ) -> StepResults:
            parts = layout.cut(vector)
            kv, states, tables, x_TD, experts_TLk = step(
                leaves, kv, states, tables, last_token, parts
            )
            hidden = jax.lax.dynamic_update_slice(hidden, x_TD, (0, 0))
            return kv, states, tables, hidden, experts_TLk

        return forward

    def decode(
        self,
        step: Callable[..., StepResults],
        layout: StepLayout,
        most: int,
        experts: Shape | None = None,
    ) -> Callable[..., object]:
        """Steps of which each token is a sequence's last, and the sampling after each.

        Args:
          step: from `make_step`, as a function of the leaves.
          layout: of the step.
          most: steps of a call, at most, K.
          experts: a token's experts, [L, k], if the step returns them.

        Returns:
          A function of (leaves, kv, states, tables, sampler, vector, steps) that returns these up
          to the sampler, the tokens, int32 [K, T], and the experts, [K, T, L, k] or None.
          Everything is allowed, and no log probabilities are wanted. The vector is the first
          step's, but for page tables, which have places for the tokens of all.
        """
        mask_TW = full_mask(self.weights.config.vocab_size, layout.tokens)

        def decode(
            leaves: list[jax.Array],
            kv: tuple[kernels.Pages, ...],
            states: DeltaState | None,
            tables: tuple[jax.Array, ...],
            sampler: SamplerState,
            vector: jax.Array,
            steps: jax.Array,
        ) -> tuple:
            parts = layout.cut(vector)

            def one(index: jax.Array, carry: tuple) -> tuple:
                *kept, sampler, tokens_KT, experts_KTLk = carry
                # Else XLA widens weights ahead of the loop, of which a step reads a few rows.
                mine, index = jax.lax.optimization_barrier((leaves, index))
                now = parts_later(parts, index)
                *kept, x_TD, experts_TLk = step(mine, *kept, sampler.last_token, now)
                sampled, sampler = sample(
                    self._logits(mine, x_TD),
                    sampler,
                    now["rows_T"],
                    now["positions_T"] + 1,
                    jnp.asarray(mask_TW),
                    num_logprobs=self.most,
                    want_logprobs=False,
                    logprobs_mode=self.logprobs_mode,
                )
                tokens_KT = tokens_KT.at[index].set(sampled.tokens)
                if experts_KTLk is not None:
                    experts_KTLk = experts_KTLk.at[index].set(experts_TLk)
                return *kept, sampler, tokens_KT, experts_KTLk

            tokens_KT = jnp.zeros((most, layout.tokens), jnp.int32)
            experts_KTLk = None
            if experts is not None:
                shape = most, layout.tokens, *experts.shape
                experts_KTLk = jnp.zeros(shape, experts.dtype)
            kept = (kv, states, tables, sampler, tokens_KT, experts_KTLk)
            return jax.lax.fori_loop(0, steps, one, kept)

        return decode

    def propose_tokens(
        self,
        leaves: list[jax.Array],
        hidden: jax.Array,
        sampler: SamplerState,
        proposals: Proposals,
        vector: jax.Array,
    ) -> tuple[jax.Array, SamplerState, Proposals]:
        """A draft model's token for each sample of such a vector."""
        logits_MV = self._logits_at(leaves, hidden, vector[0])
        return propose(logits_MV, sampler, proposals, vector[1], vector[2], vector[4])

    def score_rows(self, leaves: list[jax.Array], hidden: jax.Array, vector: jax.Array) -> Scored:
        """Log probabilities of targets; `vector` is int32 [2, M]: place in `hidden`, target."""
        logits_MV = self._logits_at(leaves, hidden, vector[0])
        return score(logits_MV, jnp.maximum(vector[1], 0), self.most)

    def _logits_at(
        self, leaves: list[jax.Array], hidden: jax.Array, places_M: jax.Array
    ) -> jax.Array:
        return self._logits(leaves, hidden[jnp.maximum(places_M, 0)])

    def _logits(self, leaves: list[jax.Array], x_MD: jax.Array) -> jax.Array:
        return self.weights.merge(self.tree.unflatten(leaves)).logits(x_MD[None])[0]


def make_programs(
    config: EngineConfig,
    weights: Weights,
    limits: Limits,
    sizes: Sizes,
    arrays: Arrays,
    *,
    draft: bool = False,
    bind: Bind | None = None,
) -> dict[tuple[str | int, ...], Program]:
    """All programs of an engine's model, the largest steps first.

    Args:
      weights: the model's; its arrays are not kept.
      sizes: to compile for.
      arrays: shapes of what is on the devices.
      bind: gives weights with adapters each token's adapter; None without adapters.

    Returns:
      By key: ("step", T), ("decode", T), ("sample", M), ("load row",), ("copy pages", group), of
      models with linear layers ("copy states",), of those with pages ("change tables",),
      ("pool",), ("score",); of a draft model ("propose", M) for ("sample", M); where the model's
      own module proposes ("draft", T).
    """
    vocab = weights.config.vocab_size
    weights = replace(weights, state=nnx.State({}))
    everywhere = weights.placement.everywhere
    leaves, tree = jax.tree.flatten(arrays.state)
    most = 0 if draft else min(config.max_logprobs, vocab)
    functions = _Functions(weights, tree, most, config.logprobs_mode)
    kv, states, tables = arrays.kv, arrays.states, arrays.tables
    hidden, sampler = arrays.hidden, arrays.sampler

    def ints(shape: tuple[int, ...], dtype: DTypeLike = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=everywhere)

    found: dict[tuple[str | int, ...], Program] = {}
    kv_places, state_places = jax.tree.map(lambda x: x.sharding, (kv, states))
    places = (kv_places, state_places, everywhere, everywhere, everywhere)
    routed = config.enable_return_routed_experts and not draft
    returned = describe_routed_experts(weights.config) if routed else None
    for size, layout in reversed(sizes.layouts.items()):
        made = make_step(
            weights, layout, limits.max_model_len, limits.cache_heads, bind, returns_experts=routed
        )
        step, vector = functions.on_leaves(made), ints((layout.size,))
        args = (leaves, kv, states, tables, hidden, sampler.last_token, vector)
        forward = functions.forward(step, layout)
        found["step", size] = Program(weights, forward, args, (1, 2, 3, 4), places)
        if size in sizes.decodes:
            decode = functions.decode(step, layout, config.num_scheduler_steps, returned)
            args = (leaves, kv, states, tables, sampler, vector, ints(()))
            where = (*places[:3], everywhere, everywhere, everywhere)
            found["decode", size] = Program(weights, decode, args, (1, 2, 3, 4), where)
    if config.mtp:
        for size, layout in reversed(sizes.layouts.items()):
            made = make_draft(
                weights, layout, limits.max_model_len, limits.cache_heads, config.num_drafts
            )
            args = (leaves, kv, tables, hidden, ints((layout.size,)), ints((2, layout.rows)))
            draft_step = functions.on_leaves(made)
            where = (kv_places, everywhere)
            found["draft", size] = Program(weights, draft_step, args, (1,), where)
    for size in sizes.samples:
        vector = ints((5, size))
        if draft:
            args = (leaves, hidden, sampler, arrays.proposals, vector)
            found["propose", size] = Program(weights, functions.propose_tokens, args, (2, 3))
            continue
        mask = ints((size, mask_words(vocab)), jnp.uint32)
        args = (leaves, hidden, sampler, vector, mask, arrays.proposals)
        found["sample", size] = Program(weights, functions.choose, args, (2,))
    row = jax.tree.map(np.asarray, RowParams.default(vocab))
    args = (sampler, ints(()), jax.tree.map(lambda x: ints(x.shape, x.dtype), row))
    found["load row",] = Program(weights, load_row, args, (0,))
    for group, pages in enumerate(kv):
        args = (pages, ints((2, COPIES)))
        places = kv_places[group]
        found["copy pages", group] = Program(weights, _copy_pages, args, (0,), places)
    if states is not None:
        args = (states, ints((2, COPIES)))
        found["copy states",] = Program(weights, copy_states, args, (0,), state_places)
    if tables:
        changes = (ints((3, CHANGES)),) * len(tables)
        found["change tables",] = Program(weights, change_tables, (tables, changes), (0,))
    found["pool",] = Program(weights, _pool_rows, (hidden, ints((POOLED,))))
    args = (leaves, hidden, ints((2, SCORED)))
    found["score",] = Program(weights, functions.score_rows, args)
    return found


def _copy_pages(kv_LPSCH: kernels.Pages, pairs: jax.Array) -> kernels.Pages:
    return kernels.copy_pages(kv_LPSCH, pairs[0], pairs[1])


def _pool_rows(hidden: jax.Array, places: jax.Array) -> jax.Array:
    """Unit vectors: the final norm's output at each place."""
    x_MD = hidden[places].astype(jnp.float32)
    return x_MD / jnp.maximum(jnp.linalg.norm(x_MD, axis=-1, keepdims=True), 1e-12)


def buckets(limit: int) -> tuple[int, ...]:
    """Sizes up to `limit`: 1, 2, 4, 8, 12, 16, 24, 32, 48, … and `limit` itself.

    From 8 on at most a third of a bucket is padding.
    """
    sizes = [1, 2, 4]
    for power in count(3):
        if 1 << power > limit:
            break
        sizes += [1 << power, 3 << (power - 1)]
    return tuple(sorted({size for size in sizes if size < limit} | {limit}))


def powers_of_four(limit: int) -> tuple[int, ...]:
    """Powers of four below `limit` from 4 on, and `limit` itself."""
    return (*(1 << power for power in range(2, limit.bit_length(), 2) if 1 << power < limit), limit)


def powers_of_two(limit: int) -> tuple[int, ...]:
    """Powers of two below `limit`, and `limit` itself."""
    return (*(1 << power for power in range(limit.bit_length()) if 1 << power < limit), limit)


def bucket_for(size: int, sizes: tuple[int, ...]) -> int:
    """The smallest of `sizes` that holds `size`."""
    return next(bucket for bucket in sizes if bucket >= size)
