"""Proposing tokens ahead: from the sequence itself, or from a smaller model.

A proposal costs nothing but time when it is wrong: the model samples at every proposed place with
that place's own random bits, and a proposed token stays only where it is what was sampled. So the
tokens are those of decoding without proposals, one by one. A draft model draws with the very bits
that the model will draw with, so that the two agree wherever their distributions do (drafting by
shared randomness; Daliri et al. 2024).
"""

from collections.abc import Sequence as Items
from typing import Any, Protocol

import numpy as np

from fornax.llm.config import NGram
from fornax.llm.plan import Entry, Plan, Sample
from fornax.llm.runner import Runner
from fornax.llm.sequence import Sequence

__all__ = ["DraftProposer", "NGramProposer", "Proposer"]


class Proposer(Protocol):
    """Sets `drafts` of sequences that are about to decode."""

    def start(self, sequence: Sequence, params: Any) -> None:
        """A sequence got a row, with these sampling parameters."""

    def finish(self, sequence: Sequence) -> None:
        """A sequence ended."""

    def propose(self, sequences: Items[Sequence]) -> None:
        """Set the drafts of sequences all of whose tokens are known."""

    def reset(self) -> None:
        """Forget what was computed: the weights or the cache are others now."""


class NGramProposer:
    """Proposes what followed the last tokens when they stood in the sequence before."""

    def __init__(self, config: NGram) -> None:
        self._config = config

    def start(self, sequence: Sequence, params: Any) -> None:
        """Nothing to prepare."""

    def finish(self, sequence: Sequence) -> None:
        """Nothing to forget."""

    def reset(self) -> None:
        """Nothing to forget."""

    def propose(self, sequences: Items[Sequence]) -> None:
        """Look each sequence's last tokens up in itself; the latest occurrence counts."""
        for sequence in sequences:
            sequence.drafts = self._look_up(np.asarray(sequence.tokens, np.int32))

    def _look_up(self, tokens: np.ndarray) -> list[int]:
        config = self._config
        for size in range(config.prompt_lookup_max, config.prompt_lookup_min - 1, -1):
            if len(tokens) <= size:
                continue
            windows = np.lib.stride_tricks.sliding_window_view(tokens[:-1], size)
            found = np.flatnonzero((windows == tokens[-size:]).all(axis=1))
            if len(found):
                start = int(found[-1]) + size
                return tokens[start : start + config.num_speculative_tokens].tolist()
        return []


class DraftProposer:
    """Proposes what a smaller model samples. Its cache gives every row its own full length."""

    def __init__(self, runner: Runner, num_tokens: int) -> None:
        self._runner = runner
        self._num_tokens = num_tokens
        self._computed: dict[int, tuple[int, int]] = {}

    def start(self, sequence: Sequence, params: Any) -> None:
        """Give the draft model's sampler the same parameters."""
        if sequence.row is not None:
            self._runner.load_row(sequence.row, params)
            self._computed.pop(sequence.id, None)

    def finish(self, sequence: Sequence) -> None:
        """Forget the sequence."""
        self._computed.pop(sequence.id, None)

    def reset(self) -> None:
        """Compute all sequences anew."""
        self._computed.clear()

    def propose(self, sequences: Items[Sequence]) -> None:
        """Bring the draft model up to each sequence's last token, then sample ahead."""
        most = self._runner.limits.max_model_len
        ready = [each for each in sequences if len(each.tokens) + self._num_tokens < most]
        if not ready:
            return
        first = self._catch_up(ready)
        tickets = [first]
        for ahead in range(1, self._num_tokens):
            plan = Plan()
            for sequence in ready:
                self._add(plan, sequence, len(sequence.tokens) - 1 + ahead, 1, sample=True)
            tickets.append(self._run(plan))
        columns = [ticket.tokens() for ticket in tickets]
        for index, sequence in enumerate(ready):
            drafts = [column[index] for column in columns]
            sequence.drafts = drafts if -1 not in drafts else []

    def _catch_up(self, ready: list[Sequence]) -> Any:
        """Compute all that the draft model has not seen; the last step samples for every one."""
        budget = self._runner.limits.max_num_batched_tokens
        waiting = {sequence.id: self._done(sequence) for sequence in ready}
        while True:
            left = sum(len(each.tokens) - waiting[each.id] for each in ready)
            if left <= budget:
                break
            plan, room = Plan(), budget
            for sequence in ready:  # all but the last token, which samples
                start = waiting[sequence.id]
                count = min(room, len(sequence.tokens) - 1 - start)
                if count > 0:
                    self._add(plan, sequence, start, count, sample=False)
                    waiting[sequence.id] += count
                    room -= count
            self._run(plan)
        plan = Plan()
        for sequence in ready:
            start = waiting[sequence.id]
            self._add(plan, sequence, start, len(sequence.tokens) - start, sample=True)
            # What is sampled ahead may be rejected: only known tokens count as computed.
            self._computed[sequence.id] = (sequence.row or 0, len(sequence.tokens))
        return self._run(plan)

    def _done(self, sequence: Sequence) -> int:
        row, computed = self._computed.get(sequence.id, (-1, 0))
        return min(computed, len(sequence.tokens) - 1) if row == sequence.row else 0

    def _add(self, plan: Plan, sequence: Sequence, start: int, count: int, *, sample: bool) -> None:
        row = sequence.row
        assert row is not None, "only running sequences are drafted for"
        plan.entries.append(Entry(sequence, row, start, count))
        plan.num_tokens += count
        if sample:
            position = start + count
            plan.samples.append(Sample(sequence, row, len(plan.entries) - 1, count - 1, position))

    def _run(self, plan: Plan) -> Any:
        bucket = self._runner.forward(plan)
        return self._runner.sample(plan, bucket, {}, set(), False, {})
