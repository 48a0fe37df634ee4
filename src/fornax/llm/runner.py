"""Runs scheduled steps on the device: builds the vector, dispatches, hands back what was sampled.

Everything here is dispatched without waiting; only `RunnerOutput` waits.

Legend: T tokens of the bucket, M samples of the bucket, R rows (sequences that can run at once),
D model width, V vocabulary, W words of an allowed-token bitmask, K log probabilities a token.
"""

import itertools
from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeVar

import jax
import numpy as np
from flax import nnx

from fornax.llm.adapters import Adapters
from fornax.llm.config import EngineConfig
from fornax.llm.executor import Executor
from fornax.llm.limits import Limits
from fornax.llm.program_cache import ProgramCache
from fornax.llm.programs import (
    CHANGES,
    COPIES,
    POOLED,
    SCORED,
    bucket_for,
)
from fornax.llm.routed_experts import Places, RoutedExperts
from fornax.llm.sampling.masks import full_mask
from fornax.llm.sampling.rejection import Proposals
from fornax.llm.sampling.sampler import Sampled, Scored
from fornax.llm.sampling.state import RowParams
from fornax.llm.scheduler_output import SchedulerOutput
from fornax.llm.sequence import Sequence
from fornax.llm.step import NO_ROW
from fornax.llm.weights import Weights
from fornax.models import cache_windows

__all__ = ["Drafted", "Runner", "RunnerOutput"]


T = TypeVar("T")


class Drafted(NamedTuple):
    """What a draft model proposed for a step's samples."""

    proposals: Proposals
    slots: dict[int, int]
    """By index of a sample: which of its row's proposals is for it."""


@dataclass(frozen=True)
class RunnerOutput:
    """What a step samples, once it is there."""

    plan: SchedulerOutput
    sampled: Sampled | None
    pooled: tuple[jax.Array, ...]
    scored: dict[int, tuple[Scored, ...]]
    """By index of an entry: pieces of its prompt tokens' log probabilities."""
    bucket: int
    routed: tuple[list[Places], jax.Array] | None = None
    """Where the step's tokens lie and which experts they took; None unless they are returned."""
    decoded_KT: jax.Array | None = None
    """int32: what `sampled` is of a call that decodes, of each of its steps."""

    def tokens(self) -> list[list[int]]:
        """The tokens of each of the plan's samples, one for each step; waits for the device."""
        if self.decoded_KT is not None:
            tokens_KM = np.asarray(self.decoded_KT)[: self.plan.steps]
        elif self.sampled is not None:
            tokens_KM = np.asarray(self.sampled.tokens)[None]
        else:
            return []
        return tokens_KM[:, : len(self.plan.samples)].T.tolist()

    @cached_property
    def logprobs(self) -> Scored:
        """Log probabilities of the sampled tokens, if they were wanted; waits for the device."""
        assert self.sampled is not None, "nothing was sampled"
        return jax.tree.map(np.asarray, Scored(*self.sampled[1:]))

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
    """Carries out scheduled steps by an executor."""

    def __init__(
        self,
        config: EngineConfig,
        weights: Weights,
        limits: Limits,
        programs: ProgramCache,
        *,
        draft: bool = False,
        apart: bool = False,
    ) -> None:
        """Make what is kept on the device, and announce the programs.

        Args:
          draft: whether it is a draft model's.
          apart: whether `forward` and `sample` are called for every step, and `decode` never.
        """
        self.weights = weights
        self.limits = limits
        self.adapters: Adapters | None = None
        if config.enable_lora and not draft:
            self.adapters = Adapters(weights, slots=config.max_loras, rank=config.max_lora_rank)
        self.executor = Executor(
            config,
            weights,
            limits,
            programs,
            self._state(),
            adapters=self.adapters is not None,
            draft=draft,
            apart=apart,
        )
        self.routed: RoutedExperts | None = None
        if config.enable_return_routed_experts and not draft:
            self.routed = RoutedExperts(weights.config, limits)
        self._taken: tuple[list[Places], jax.Array] | None = None
        self._mtp = config.mtp
        self._last: tuple[SchedulerOutput, int, np.ndarray] | None = None
        """The last step and its vector, until the model's own module has read it."""
        self._sizes = self.executor.sizes
        self.most_steps = config.num_scheduler_steps if self._sizes.decodes else 1
        """Steps of a call, at most."""
        self._vocab = weights.config.vocab_size

    @property
    def buckets(self) -> tuple[int, ...]:
        """Tokens of the steps that are compiled."""
        return self._sizes.steps

    def update_weights(self, weights: Weights) -> None:
        """Run later steps with other weights of the same model.

        Raises:
          EngineError: the engine runs in several processes.
        """
        self.weights = weights
        self.executor.use(self._state())

    def _state(self) -> nnx.State:
        """The weights, with adapters around them if there are any."""
        state = self.weights.state
        return state if self.adapters is None else self.adapters.attach(state)

    def _place_adapters(self, names: Mapping[int, str]) -> dict[int, int]:
        """Bring the step's adapters to the device; returns the slot of each entry that has one."""
        if self.adapters is None:
            return {}
        if self.adapters.place(set(names.values())):
            self.executor.use(self._state())
        return {index: self.adapters.slot(name) for index, name in names.items()}

    # A step.

    def load_row(self, row: int, params: RowParams) -> None:
        """Prepare a row of the sampler for the sequence that begins or resumes there."""
        self.executor.load_row(np.int32(row), *jax.tree.leaves(params))

    def forward(self, plan: SchedulerOutput, adapters: Mapping[int, str] | None = None) -> int:
        """Dispatch the model's part of a step; returns the bucket.

        Args:
          adapters: index of an entry to the name of its adapter.
        """
        bucket, vector = self._prepare(plan, adapters or {}, self.buckets)
        with self._annotation("engine/forward", plan, bucket):
            self._take(plan, self.executor.step(np.int32(bucket), vector))
        if self._mtp:
            self._last = (plan, bucket, vector)
        self._keep_states(plan)
        return bucket

    def decodes(self, plan: SchedulerOutput) -> bool:
        """Whether there is a program for the call's steps together with their sampling."""
        return bool(self._sizes.decodes) and plan.is_decode

    def decode(
        self, plan: SchedulerOutput, adapters: Mapping[int, str] | None = None
    ) -> RunnerOutput:
        """Dispatch steps that it `decodes`, with their sampling; see `Executor.decode`."""
        bucket, vector = self._prepare(plan, adapters or {}, self._sizes.decodes)
        with self._annotation("engine/decode", plan, bucket):
            steps = np.int32(plan.steps)
            tokens_KT, experts = self.executor.decode(np.int32(bucket), vector, steps)
        self._take(plan, experts)
        self._keep_states(plan)
        return RunnerOutput(plan, None, (), {}, bucket, self._taken, tokens_KT)

    def _prepare(
        self, plan: SchedulerOutput, adapters: Mapping[int, str], sizes: tuple[int, ...]
    ) -> tuple[int, np.ndarray]:
        """Dispatch what goes ahead of a step; returns its bucket of `sizes`, and its vector."""
        slots = self._place_adapters(adapters)
        self._copy(plan)
        self._copy_states(plan.restored)
        bucket = bucket_for(plan.num_tokens, sizes)
        layout = self._sizes.layouts[bucket]
        vector, parts = layout.empty()
        self._fill(plan, parts, slots)
        for group, change_3U in enumerate(self._changes(plan, layout.changes)):
            parts[f"changes_3U.{group}"][:, : change_3U.shape[1]] = change_3U
        return bucket, vector

    def _take(self, plan: SchedulerOutput, experts: jax.Array | None) -> None:
        if self.routed is not None and experts is not None:
            self._taken = (self.routed.places(plan), experts)

    def _keep_states(self, plan: SchedulerOutput) -> None:
        versions = self.limits.state_versions
        forked = [(row * versions, child * versions) for child, row in plan.forks.items()]
        self._copy_states([*plan.kept, *forked])

    def sample(
        self,
        plan: SchedulerOutput,
        bucket: int,
        masks: dict[int, np.ndarray],
        dead: set[int],
        logprobs: bool,
        scores: dict[int, np.ndarray],
        drafted: Drafted | None = None,
    ) -> RunnerOutput:
        """Dispatch the sampling of a step that `forward` was given.

        Args:
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
            sampled = self.executor.sample(
                vector,
                self._mask(masks, vector.shape[1]),
                proposals=None if drafted is None else drafted.proposals,
            )
        return RunnerOutput(plan, sampled, pooled, scored, bucket, self._taken)

    def propose(self, plan: SchedulerOutput, slots: dict[int, int]) -> jax.Array:
        """Dispatch a whole step of the draft model, into `proposals`.

        Args:
          slots: by index of a sample, which of its row's proposals it becomes.

        Returns:
          The tokens, int32 [M]; -1 where the logits are not finite.
        """
        self.forward(plan)
        vector = self._sample_vector(plan, _starts(plan), set(), slots)
        return self.executor.propose(vector)

    def draft(self) -> tuple[SchedulerOutput, jax.Array] | None:
        """Let the model's own module read the last step, all of whose tokens are known by now.

        Returns:
          The step, and what the module proposes after each of its entries, int32 [R, K]; None where
          no step has been since the last call.
        """
        if self._last is None:
            return None
        plan, bucket, vector = self._last
        self._last, vector = None, vector.copy()  # the device may still read the step's own
        layout = self._sizes.layouts[bucket]
        parts, at = layout.cut(vector), 0
        ends = np.zeros((2, layout.rows), np.int32)
        ends[0] = -1
        for index, entry in enumerate(plan.entries):
            known = entry.sequence.tokens[entry.start + 1 : entry.stop + 1]
            parts["tokens_T"][at : at + len(known)] = known
            parts["rows_T"][at + len(known) : at + entry.count] = -1
            if known:
                ends[:, index] = at + len(known) - 1, self.places(entry.sequence)
            at += entry.count
        return plan, self.executor.draft(np.int32(bucket), vector, ends)

    def places(self, sequence: Sequence) -> int:
        """Tokens that the pages of layers with full attention have places for."""
        group = cache_windows(self.weights.config).index(None)
        return len(sequence.pages[group]) * self.limits.page_size if sequence.pages else 0

    def forget_step(self) -> None:
        """Leave out what the model's own module has not read: the cache is another now."""
        self._last = None

    def _sample_vector(
        self, plan: SchedulerOutput, starts: list[int], dead: set[int], slots: dict[int, int]
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

    def _fill(
        self, plan: SchedulerOutput, parts: dict[str, np.ndarray], adapters: dict[int, int]
    ) -> None:
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
                positions[at:end] = np.arange(entry.start, entry.start + count)
            parts["rows_T"][at:end] = entry.row
            parts["rows_R"][index] = entry.row
            starts[index + 1] = end
            lens[index] = entry.start + count
            if versions := self.limits.state_versions:
                first, kept = entry.row * versions, parts["kept_RJ"][index]
                parts["slots_R"][index] = first + entry.state
                if entry.drafts:
                    kept[:count] = np.arange(first, first + count)
                else:  # of a long sequence the first, of a short one that of its last token
                    kept[0 if count > versions else count - 1] = first + entry.next_state
            if index in adapters:
                parts["adapters_T"][at:end] = adapters[index]
            at = end
        starts[len(plan.entries) + 1 :] = at

    def _changes(self, plan: SchedulerOutput, most: int) -> list[np.ndarray]:
        """What changes in each page table, int32 [3, at most `most`]; the rest is dispatched."""
        found: list[dict[tuple[int, int], int]] = [{} for _ in self.executor.tables]
        for update in plan.updates:  # in order: the last one of an entry counts
            found[update.group][update.row, update.index] = update.page
        changes = [
            np.array([(*place, page) for place, page in each.items()], np.int32).reshape(-1, 3).T
            for each in found
        ]
        longest = max((change_3U.shape[1] for change_3U in changes), default=0)
        for first in range(most, longest, CHANGES):
            vectors = [np.full((3, CHANGES), NO_ROW, np.int32) for _ in changes]
            for vector, change_3U in zip(vectors, changes, strict=True):
                part = change_3U[:, first : first + CHANGES]
                vector[:, : part.shape[1]] = part
            self.executor.change_tables(*vectors)
        return [change_3U[:, :most] for change_3U in changes]

    def _copy(self, plan: SchedulerOutput) -> None:
        for group in range(len(self.executor.tables)):
            pairs = [(c.source, c.target) for c in plan.copies if c.group == group]
            for first in range(0, len(pairs), COPIES):
                vector = np.zeros((2, COPIES), np.int32)
                part = pairs[first : first + COPIES]
                vector[:, : len(part)] = np.array(part, np.int32).T
                self.executor.copy_pages(np.int32(group), vector)

    def _copy_states(self, pairs: Items[tuple[int, int]]) -> None:
        """Copy slots of states, source and target each, where the model keeps any."""
        for first in range(0, len(pairs) if self.executor.states is not None else 0, COPIES):
            vector = np.full((2, COPIES), NO_ROW, np.int32)
            part = pairs[first : first + COPIES]
            vector[:, : len(part)] = np.array(part, np.int32).T
            self.executor.copy_states(vector)

    def _mask(self, masks: dict[int, np.ndarray], size: int) -> np.ndarray | None:
        if not masks:
            return None
        mask = full_mask(self._vocab, size)
        for index, row in masks.items():
            mask[index] = row
        return mask

    def _pool(self, places: Items[int]) -> tuple[jax.Array, ...]:
        parts = []
        for first in range(0, len(places), POOLED):
            vector = np.zeros(POOLED, np.int32)
            vector[: len(places[first : first + POOLED])] = places[first : first + POOLED]
            parts.append(self.executor.pool(vector))
        return tuple(parts)

    def _score(self, start: int, targets: np.ndarray) -> tuple[Scored, ...]:
        parts = []
        for first in range(0, len(targets), SCORED):
            vector = np.full((2, SCORED), -1, np.int32)
            part = targets[first : first + SCORED]
            vector[0, : len(part)] = start + first + np.arange(len(part))
            vector[1, : len(part)] = part
            parts.append(self.executor.score(vector))
        return tuple(parts)

    def _annotation(
        self, name: str, plan: SchedulerOutput, bucket: int
    ) -> jax.profiler.TraceAnnotation:
        """Shows in profiles how much of a call's batch is filled; `fornax.profile.serving` reads
        it."""
        return jax.profiler.TraceAnnotation(
            name,
            sequences=len(plan.entries),
            tokens=plan.num_tokens,
            bucket=bucket,
            steps=plan.steps,
            most_sequences=self.limits.max_num_seqs,
            most_tokens=self.limits.max_num_batched_tokens,
        )


def _starts(plan: SchedulerOutput) -> list[int]:
    """Where each entry's tokens begin in the step."""
    return list(itertools.accumulate((entry.count for entry in plan.entries), initial=0))
