"""Runs plans on the device: builds a step's vector, dispatches, and hands back what was sampled.

Everything here is dispatched without waiting; only `Ticket` waits.

Legend: T tokens of the bucket, M samples of the bucket, R rows (sequences that can run at once),
D model width, V vocabulary, W words of an allowed-token bitmask, K log probabilities a token.
"""

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import cached_property, partial, wraps
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from fornax import kernels
from fornax.llm.buckets import bucket_for, buckets, powers
from fornax.llm.limits import Limits
from fornax.llm.logprobs import Scores
from fornax.llm.masks import full_mask, mask_words
from fornax.llm.plan import Plan
from fornax.llm.programs import Programs
from fornax.llm.sampler import (
    RowParams,
    Sampled,
    SamplerState,
    init_sampler_state,
    load_row,
    sample,
    score,
)
from fornax.llm.step import Bind, StepLayout, make_step, placed
from fornax.llm.weights import Weights
from fornax.models import cache_windows, init_pages

__all__ = ["Runner", "Ticket"]

_COPIES = 16
"""Page copies of one call; more take several."""
_SCORED = 32
"""Prompt tokens scored by one call."""
_POOLED = 8
"""Hidden rows read by one call."""


@dataclass(frozen=True)
class Ticket:
    """What a step samples, once it is there."""

    plan: Plan
    sampled: Sampled | None
    pooled: tuple[jax.Array, ...]
    scored: dict[int, tuple[Any, ...]]
    """By index of an entry: pieces of its prompt tokens' log probabilities."""
    bucket: int

    def tokens(self) -> list[int]:
        """The token of each of the plan's samples; waits for the device."""
        if self.sampled is None:
            return []
        return np.asarray(self.sampled.tokens)[: len(self.plan.samples)].tolist()

    @cached_property
    def logprobs(self) -> Scores:
        """Log probabilities of the sampled tokens, if they were wanted; waits for the device."""
        assert self.sampled is not None, "nothing was sampled"
        return Scores.read(self.sampled)

    def embeddings(self) -> np.ndarray:
        """float32 [pooled samples, D]; waits for the device."""
        rows = [np.asarray(part) for part in self.pooled]
        return np.concatenate(rows)[: len(self.plan.pooled)]


class Runner:
    """A model, its cache and its sampler on the device."""

    def __init__(
        self,
        weights: Weights,
        limits: Limits,
        programs: Programs,
        *,
        max_logprobs: int,
        drafts: int = 0,
        name: str = "model",
        state: Any = None,
        bind: Bind | None = None,
    ) -> None:
        self.weights = weights
        self.limits = limits
        self.buckets = buckets(limits.max_num_batched_tokens)
        self._programs = programs
        self._name = name
        self._bind = bind
        # Programs take the leaves: to take the state apart at every call would cost as much as the
        # call itself.
        self._leaves, self._tree = jax.tree.flatten(weights.state if state is None else state)
        self._vocab = weights.config.vocab_size
        self._max_logprobs = min(max_logprobs, self._vocab)
        self._rows = limits.max_num_seqs
        self._sample_sizes = powers(min(self._rows * (1 + drafts), self.buckets[-1]))
        groups = len(cache_windows(weights.config))
        self._layouts = {
            size: StepLayout(size, min(size, self._rows), limits.table_width, groups)
            for size in self.buckets
        }
        self._tables = [np.zeros((self._rows, limits.table_width), np.int32) for _ in range(groups)]
        self._everywhere = self._replicated()
        shape = (limits.max_num_batched_tokens, weights.config.hidden_size)
        self._hidden = self._zeros(shape, weights.placement.compute_dtype)
        self._sampler: SamplerState = self._put(init_sampler_state(self._rows, self._vocab))
        self._all_allowed = {
            size: self._put(full_mask(self._vocab, size)) for size in self._sample_sizes
        }
        self._kv: tuple[jax.Array, ...] | None = None
        self.wake()
        self._announce()

    # The cache.

    def sleep(self) -> None:
        """Give the cache's memory back."""
        for pages in self._kv or ():
            pages.delete()
        self._kv = None

    def wake(self) -> None:
        """Make an empty cache if there is none."""
        if self._kv is None:
            limits, where = self.limits, self.weights.placement
            self._kv = init_pages(
                self.weights.config,
                limits.num_pages,
                limits.page_size,
                limits.cache_dtype,
                where.mesh,
            )

    def update_weights(self, weights: Weights, state: Any = None) -> None:
        """Run later steps with other weights of the same model.

        Args:
          weights: the weights.
          state: the same with adapters, where the runner was made for adapters.
        """
        self.weights = weights
        self.use_state(weights.state if state is None else state)

    def use_state(self, state: Any) -> None:
        """Run later steps with these parameters, of the same shapes and places."""
        leaves, tree = jax.tree.flatten(state)
        assert tree == self._tree, "the state differs in more than its arrays"
        self._leaves = leaves

    def use_fixed_tables(self) -> None:
        """Give every row its own pages for good, for a cache that nobody keeps books of."""
        width = self.limits.table_width
        for table in self._tables:
            table[:] = 1 + np.arange(self._rows * width, dtype=np.int32).reshape(-1, width)

    # A step.

    def load_row(self, row: int, params: RowParams) -> None:
        """Prepare a row of the sampler for the sequence that begins or resumes there."""
        load = self._programs.get((self._name, "load row"))
        self._sampler = load(self._sampler, np.int32(row), params)

    def forward(self, plan: Plan, adapters: dict[int, int] | None = None) -> int:
        """Dispatch the model's part of a step; returns the bucket.

        Args:
          plan: the step.
          adapters: index of an entry to the slot of its adapter.
        """
        for update in plan.updates:
            self._tables[update.group][update.row, update.index] = update.page
        self._copy(plan)
        bucket = bucket_for(plan.num_tokens, self.buckets)
        layout = self._layouts[bucket]
        vector, parts = layout.empty()
        self._fill(plan, parts, adapters or {})
        program = self._programs.get((self._name, "step", bucket))
        self._kv, self._hidden = program(
            self._leaves, self._kv, self._hidden, self._sampler.last_token, vector
        )
        return bucket

    def sample(
        self,
        plan: Plan,
        bucket: int,
        masks: dict[int, np.ndarray],
        dead: set[int],
        logprobs: bool,
        scores: dict[int, np.ndarray],
    ) -> Ticket:
        """Dispatch the sampling of a step that `forward` was given.

        Args:
          plan: the step.
          bucket: what `forward` returned.
          masks: index of a sample to its allowed-token bitmask, uint32 [W].
          dead: indices of samples that nobody waits for any more.
          logprobs: whether some sample's log probabilities are wanted.
          scores: index of an entry to the int32 targets of all its tokens, for prompt logprobs; -1
            where there is none.
        """
        starts = _starts(plan)
        scored = {index: self._score(starts[index], targets) for index, targets in scores.items()}
        pooled = self._pool([starts[s.entry] + s.offset for s in plan.pooled])
        sampled = None
        if plan.samples:
            size = bucket_for(len(plan.samples), self._sample_sizes)
            vector = np.full((4, size), -1, np.int32)
            for index, one in enumerate(plan.samples):
                if index not in dead:
                    vector[0, index] = starts[one.entry] + one.offset
                    vector[1, index] = one.row
                    vector[2, index] = one.position
            vector[3, 0] = logprobs
            program = self._programs.get((self._name, "sample", size))
            mask = self._mask(masks, size)
            args = (self._leaves, self._hidden, self._sampler, vector, mask)
            sampled, self._sampler = program(*args)
        return Ticket(plan, sampled, pooled, scored, bucket)

    def _fill(self, plan: Plan, parts: dict[str, np.ndarray], adapters: dict[int, int]) -> None:
        tokens, positions, source = parts["tokens_T"], parts["positions_T"], parts["source_T"]
        starts, lens = parts["query_start_R1"], parts["context_lens_R"]
        rows = np.zeros(len(tokens), np.int32)
        at = 0
        for index, entry in enumerate(plan.entries):
            sequence, count = entry.sequence, entry.count
            end = at + count
            if count == 1 and entry.start >= len(sequence.tokens):
                source[at] = entry.row
                positions[at] = entry.start
            else:
                known = sequence.tokens[entry.start : entry.stop]
                if entry.drafts:
                    known = known + sequence.drafts[: entry.drafts]
                tokens[at : at + len(known)] = known
                if len(known) < count:
                    source[end - 1] = entry.row
                positions[at:end] = np.arange(entry.start, entry.stop)
            rows[at:end] = entry.row
            starts[index + 1] = end
            lens[index] = entry.stop
            if index in adapters:
                parts["adapters_T"][at:end] = adapters[index]
            at = end
        starts[len(plan.entries) + 1 :] = at
        order = [entry.row for entry in plan.entries]
        size = self.limits.page_size
        page_T, slot_T = np.divmod(positions[:at], size)
        for group, table in enumerate(self._tables):
            parts[f"page_table_RW.{group}"][: len(order)] = table[order]
            parts[f"slots_T.{group}"][:at] = table[rows[:at], page_T] * size + slot_T

    def _copy(self, plan: Plan) -> None:
        for group in range(len(self._tables)):
            pairs = [(c.source, c.target) for c in plan.copies if c.group == group]
            for first in range(0, len(pairs), _COPIES):
                vector = np.zeros((2, _COPIES), np.int32)
                part = pairs[first : first + _COPIES]
                vector[:, : len(part)] = np.array(part, np.int32).T
                copy = self._programs.get((self._name, "copy pages", group))
                kv = list(self._kv or ())
                kv[group] = copy(kv[group], vector)
                self._kv = tuple(kv)

    def _mask(self, masks: dict[int, np.ndarray], size: int) -> jax.Array | np.ndarray:
        if not masks:
            return self._all_allowed[size]
        mask = full_mask(self._vocab, size)
        for index, row in masks.items():
            mask[index] = row
        return mask

    def _pool(self, places: Items[int]) -> tuple[jax.Array, ...]:
        parts = []
        for first in range(0, len(places), _POOLED):
            vector = np.zeros(_POOLED, np.int32)
            vector[: len(places[first : first + _POOLED])] = places[first : first + _POOLED]
            program = self._programs.get((self._name, "pool"))
            parts.append(program(self._hidden, vector))
        return tuple(parts)

    def _score(self, start: int, targets: np.ndarray) -> tuple[Any, ...]:
        parts = []
        for first in range(0, len(targets), _SCORED):
            vector = np.full((2, _SCORED), -1, np.int32)
            part = targets[first : first + _SCORED]
            vector[0, : len(part)] = start + first + np.arange(len(part))
            vector[1, : len(part)] = part
            program = self._programs.get((self._name, "score"))
            parts.append(program(self._leaves, self._hidden, vector))
        return tuple(parts)

    # What is compiled.

    def _announce(self) -> None:
        leaves, kv = _abstract(self._leaves), _abstract(self._kv)
        hidden, sampler = _abstract(self._hidden), _abstract(self._sampler)
        name, announce = self._name, self._programs.announce
        for size, layout in reversed(self._layouts.items()):
            step = make_step(self.weights, layout, self.limits.max_model_len, self._bind)
            vector = self._ints((layout.size,))
            args = (leaves, kv, hidden, sampler.last_token, vector)
            results = (tuple(pages.sharding for pages in kv), self._everywhere)
            make = partial(self._compile, self._on_leaves(step), args, (1, 2), results)
            announce((name, "step", size), make)
        for size in self._sample_sizes:
            mask = self._ints((size, mask_words(self._vocab)), jnp.uint32)
            args = (leaves, hidden, sampler, self._ints((4, size)), mask)
            make = partial(self._compile, self._on_leaves(self._sample), args, (2,))
            announce((name, "sample", size), make)
        row = jax.tree.map(np.asarray, RowParams.default(self._vocab))
        args = (sampler, self._ints(()), jax.tree.map(lambda x: self._ints(x.shape, x.dtype), row))
        announce((name, "load row"), partial(self._compile, load_row, args, (0,)))
        for group, pages in enumerate(kv):
            args = (pages, self._ints((2, _COPIES)))
            make = partial(self._compile, _copy_pages, args, (0,), pages.sharding)
            announce((name, "copy pages", group), make)
        args = (hidden, self._ints((_POOLED,)))
        announce((name, "pool"), partial(self._compile, _pool_rows, args, ()))
        args = (leaves, hidden, self._ints((2, _SCORED)))
        make = partial(self._compile, self._on_leaves(self._score_rows), args, ())
        announce((name, "score"), make)

    def _on_leaves(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function with the leaves of its first argument, the state, in its place."""

        @wraps(function)
        def on_leaves(leaves: Any, *rest: Any) -> Any:
            return function(self._tree.unflatten(leaves), *rest)

        return on_leaves

    def _compile(
        self, function: Any, args: Any, donated: tuple[int, ...], results: Any = None
    ) -> Any:
        """Compile ahead of time; over a mesh, `results` lie where the next step wants them."""
        where = {} if self._everywhere is None else {"out_shardings": results or self._everywhere}
        with placed(self.weights):
            jitted = jax.jit(function, donate_argnums=donated, **where)
            return jitted.lower(*args).compile()

    def _sample(
        self, state: Any, hidden: jax.Array, sampler: SamplerState, vector: jax.Array, mask: Any
    ) -> tuple[Sampled, SamplerState]:
        places_M, rows_M, positions_M = vector[0], vector[1], vector[2]
        logits_MV = self._logits(state, hidden[jnp.maximum(places_M, 0)])
        return sample(
            logits_MV,
            sampler,
            rows_M,
            positions_M,
            mask,
            num_logprobs=self._max_logprobs,
            want_logprobs=vector[3, 0] > 0,
        )

    def _score_rows(self, state: Any, hidden: jax.Array, vector: jax.Array) -> Any:
        logits_MV = self._logits(state, hidden[jnp.maximum(vector[0], 0)])
        return score(logits_MV, jnp.maximum(vector[1], 0), self._max_logprobs)

    def _logits(self, state: Any, x_MD: jax.Array) -> jax.Array:
        return self.weights.merge(state).logits(x_MD[None])[0]

    # Arrays.

    def _replicated(self) -> Any:
        mesh = self.weights.placement.mesh
        return None if mesh is None else NamedSharding(mesh, PartitionSpec())

    def _put(self, tree: Any) -> Any:
        return jax.device_put(tree, self._everywhere)

    def _zeros(self, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        return self._put(jnp.zeros(shape, dtype))

    def _ints(self, shape: tuple[int, ...], dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self._everywhere)


def _starts(plan: Plan) -> list[int]:
    """Where each entry's tokens begin in the step."""
    starts, at = [], 0
    for entry in plan.entries:
        starts.append(at)
        at += entry.count
    return starts


def _abstract(tree: Any) -> Any:
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), tree
    )


def _copy_pages(kv_LPSCH: jax.Array, pairs: jax.Array) -> jax.Array:
    return kernels.copy_pages(kv_LPSCH, pairs[0], pairs[1])


def _pool_rows(hidden: jax.Array, places: jax.Array) -> jax.Array:
    """Unit vectors: the final norm's output at each place."""
    x_MD = hidden[places].astype(jnp.float32)
    return x_MD / jnp.maximum(jnp.linalg.norm(x_MD, axis=-1, keepdims=True), 1e-12)
