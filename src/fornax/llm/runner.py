"""Runs plans on the device: builds a step's vector, dispatches, and hands back what was sampled.

Everything here is dispatched without waiting; only `Ticket` waits.

Legend: T tokens of the bucket, M samples of the bucket, R rows (sequences that can run at once),
D model width, V vocabulary, W words of an allowed-token bitmask, K log probabilities a token.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fornax.llm.buckets import bucket_for
from fornax.llm.compilation import (
    CHANGES,
    COPIES,
    POOLED,
    SCORED,
    Arrays,
    Sizes,
    abstract,
    describe_arrays,
    make_programs,
)
from fornax.llm.config import LogprobsMode
from fornax.llm.limits import Limits
from fornax.llm.logprobs import Scores
from fornax.llm.masks import full_mask
from fornax.llm.plan import Plan
from fornax.llm.programs import Programs
from fornax.llm.rejection import Proposals, init_proposals
from fornax.llm.sampler import RowParams, Sampled, SamplerState, init_sampler_state
from fornax.llm.step import NO_ROW, Bind
from fornax.llm.weights import Weights
from fornax.models import init_pages

__all__ = ["Drafted", "Runner", "Ticket"]


class Drafted(NamedTuple):
    """What a draft model proposed for a step's samples."""

    proposals: Proposals
    slots: dict[int, int]
    """By index of a sample: which of its row's proposals is for it."""


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

    @cached_property
    def token_logprobs(self) -> list[float]:
        """Log probability of each of the plan's samples, if wanted; waits for the device."""
        assert self.sampled is not None, "nothing was sampled"
        return np.asarray(self.sampled.logprobs)[: len(self.plan.samples)].tolist()

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
        logprobs_mode: LogprobsMode = "raw_logprobs",
        drafts: int = 0,
        places: int = 0,
        proposes: bool = False,
        coarse: bool = False,
        name: str = "model",
        state: Any = None,
        bind: Bind | None = None,
    ) -> None:
        """Make what is kept on the device, and announce the programs.

        Args:
          weights: the model's.
          limits: the engine's.
          programs: to compile with.
          max_logprobs: K, at most.
          logprobs_mode: of which distribution, see `EngineConfig`.
          drafts: tokens proposed for a sequence at a time, at most.
          places: proposals of a draft model that a row has room for; 0 without one.
          proposes: whether this is the draft model.
          coarse: whether to compile few sizes, see `EngineConfig.step_sizes`.
          name: of the programs.
          state: the weights with adapters, if there are any.
          bind: gives weights with adapters each token's adapter.
        """
        self.weights = weights
        self.limits = limits
        self._sizes = Sizes.of(weights, limits, drafts, coarse=coarse)
        self._programs = programs
        self._name = name
        state = weights.state if state is None else state
        self._leaves, self._tree = jax.tree.flatten(state)
        self._vocab = weights.config.vocab_size
        self._rows = limits.max_num_seqs
        kept = describe_arrays(weights, limits, self._sizes, places)
        self._tables = self._put(tuple(jnp.zeros(each.shape, each.dtype) for each in kept.tables))
        self._hidden = self._put(jnp.zeros(kept.hidden.shape, kept.hidden.dtype))
        self._sampler: SamplerState = self._put(init_sampler_state(self._rows, self._vocab))
        self._all_allowed = {
            size: self._put(full_mask(self._vocab, size)) for size in self._sizes.samples
        }
        self._kv: tuple[jax.Array, ...] | None = None
        self.wake()
        self.proposals: Proposals | None = None
        """Of a draft model: what it proposed last, for every row."""
        if proposes:
            made = init_proposals(self._rows, places, self._vocab)
            self.proposals = self._put(made)
        self._announce(kept.proposals, bind, state, max_logprobs, logprobs_mode, proposes)

    @property
    def buckets(self) -> tuple[int, ...]:
        """Tokens of the steps that are compiled."""
        return self._sizes.steps

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
                heads=limits.cache_heads,
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
        self._copy(plan)
        bucket = bucket_for(plan.num_tokens, self.buckets)
        layout = self._sizes.layouts[bucket]
        vector, parts = layout.empty()
        self._fill(plan, parts, adapters or {})
        for group, change_3U in enumerate(self._changes(plan, layout.changes)):
            parts[f"changes_3U.{group}"][:, : change_3U.shape[1]] = change_3U
        program = self._programs.get((self._name, "step", bucket))
        self._kv, self._tables, self._hidden = program(
            self._leaves, self._kv, self._tables, self._hidden, self._sampler.last_token, vector
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
        drafted: Drafted | None = None,
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
          drafted: what a draft model proposed, where there is one.
        """
        starts = _starts(plan)
        scored = {index: self._score(starts[index], targets) for index, targets in scores.items()}
        pooled = self._pool([starts[s.entry] + s.offset for s in plan.pooled])
        sampled = None
        if plan.samples:
            slots = {} if drafted is None else drafted.slots
            vector = self._sample_vector(plan, starts, dead, slots)
            vector[3, 0] = logprobs
            size = vector.shape[1]
            program = self._programs.get((self._name, "sample", size))
            args = (self._leaves, self._hidden, self._sampler, vector, self._mask(masks, size))
            proposals = None if drafted is None else drafted.proposals
            sampled, self._sampler = program(*args, proposals)
        return Ticket(plan, sampled, pooled, scored, bucket)

    def propose(self, plan: Plan, slots: dict[int, int]) -> jax.Array:
        """Dispatch a whole step of the draft model, into `proposals`.

        Args:
          plan: the step.
          slots: by index of a sample, which of its row's proposals it becomes.

        Returns:
          The tokens, int32 [M]; -1 where the logits are not finite.
        """
        self.forward(plan)
        vector = self._sample_vector(plan, _starts(plan), set(), slots)
        program = self._programs.get((self._name, "propose", vector.shape[1]))
        args = (self._leaves, self._hidden, self._sampler, self.proposals, vector)
        tokens, self._sampler, self.proposals = program(*args)
        return tokens

    def _sample_vector(
        self, plan: Plan, starts: list[int], dead: set[int], slots: dict[int, int]
    ) -> np.ndarray:
        size = bucket_for(len(plan.samples), self._sizes.samples)
        vector = np.full((5, size), -1, np.int32)
        for index, one in enumerate(plan.samples):
            if index not in dead:
                vector[0, index] = starts[one.entry] + one.offset
                vector[1, index] = one.row
                vector[2, index] = one.position
                vector[4, index] = slots.get(index, -1)
        return vector

    def _fill(self, plan: Plan, parts: dict[str, np.ndarray], adapters: dict[int, int]) -> None:
        tokens, positions, source = parts["tokens_T"], parts["positions_T"], parts["source_T"]
        starts, lens = parts["query_start_R1"], parts["context_lens_R"]
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
            parts["rows_T"][at:end] = entry.row
            parts["rows_R"][index] = entry.row
            starts[index + 1] = end
            lens[index] = entry.stop
            if index in adapters:
                parts["adapters_T"][at:end] = adapters[index]
            at = end
        starts[len(plan.entries) + 1 :] = at

    def _changes(self, plan: Plan, most: int) -> list[np.ndarray]:
        """What changes in each page table, int32 [3, at most `most`]; the rest is dispatched."""
        found: list[dict[tuple[int, int], int]] = [{} for _ in self._tables]
        for update in plan.updates:  # in order: the last one of an entry counts
            found[update.group][update.row, update.index] = update.page
        changes = [
            np.array([(*place, page) for place, page in each.items()], np.int32).reshape(-1, 3).T
            for each in found
        ]
        longest = max(change_3U.shape[1] for change_3U in changes)
        for first in range(most, longest, CHANGES):
            vectors = [np.full((3, CHANGES), NO_ROW, np.int32) for _ in changes]
            for vector, change_3U in zip(vectors, changes, strict=True):
                part = change_3U[:, first : first + CHANGES]
                vector[:, : part.shape[1]] = part
            change = self._programs.get((self._name, "change tables"))
            self._tables = change(self._tables, tuple(vectors))
        return [change_3U[:, :most] for change_3U in changes]

    def _copy(self, plan: Plan) -> None:
        for group in range(len(self._tables)):
            pairs = [(c.source, c.target) for c in plan.copies if c.group == group]
            for first in range(0, len(pairs), COPIES):
                vector = np.zeros((2, COPIES), np.int32)
                part = pairs[first : first + COPIES]
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
        for first in range(0, len(places), POOLED):
            vector = np.zeros(POOLED, np.int32)
            vector[: len(places[first : first + POOLED])] = places[first : first + POOLED]
            program = self._programs.get((self._name, "pool"))
            parts.append(program(self._hidden, vector))
        return tuple(parts)

    def _score(self, start: int, targets: np.ndarray) -> tuple[Any, ...]:
        parts = []
        for first in range(0, len(targets), SCORED):
            vector = np.full((2, SCORED), -1, np.int32)
            part = targets[first : first + SCORED]
            vector[0, : len(part)] = start + first + np.arange(len(part))
            vector[1, : len(part)] = part
            program = self._programs.get((self._name, "score"))
            parts.append(program(self._leaves, self._hidden, vector))
        return tuple(parts)

    def _announce(
        self,
        proposals: Proposals | None,
        bind: Bind | None,
        state: Any,
        max_logprobs: int,
        logprobs_mode: LogprobsMode,
        proposes: bool,
    ) -> None:
        arrays = Arrays(
            state=abstract(state),
            kv=abstract(self._kv),
            tables=abstract(self._tables),
            hidden=abstract(self._hidden),
            sampler=abstract(self._sampler),
            masks=abstract(self._all_allowed),
            proposals=proposals,
        )
        programs = make_programs(
            self.weights,
            self.limits,
            self._sizes,
            arrays,
            max_logprobs=max_logprobs,
            logprobs_mode=logprobs_mode,
            proposes=proposes,
            bind=bind,
        )
        for key, program in programs.items():
            self._programs.announce((self._name, *key), program.compile)

    # Arrays.

    def _put(self, tree: Any) -> Any:
        return jax.device_put(tree, self.weights.placement.everywhere)


def _starts(plan: Plan) -> list[int]:
    """Where each entry's tokens begin in the step."""
    starts, at = [], 0
    for entry in plan.entries:
        starts.append(at)
        at += entry.count
    return starts
