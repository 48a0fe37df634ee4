"""Speculative decoding: tokens proposed from the sequence itself, by the model's own module for
multi-token prediction, or by a smaller model.

The model samples at every proposed place, and a proposed token stays only where it is what was
sampled. Tokens looked up in the sequence, and the module's most likely ones, do not change what is
sampled. A draft model's do: the
model keeps or corrects them by rejection sampling (`sampling/rejection.py`), which leaves its
distribution as it is, and its most likely token too.

What a seeded request samples at a place must not depend on what runs beside it, so neither may
whether the draft model has a proposal there: it has one for every place after the first, also for
those that the scheduler finds no room to try, and for the one after them.
"""

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from itertools import takewhile

import jax
import numpy as np

from fornax.llm.config import NGram
from fornax.llm.runner import Drafted, Runner
from fornax.llm.sampling.state import RowParams
from fornax.llm.scheduler_output import Entry, PageUpdate, Sample, SchedulerOutput
from fornax.llm.sequence import Sequence

__all__ = ["DraftProposer", "MTPProposer", "NGramProposer", "Proposer", "accepted_tokens"]


def accepted_tokens(drafts: list[int], sampled: list[int]) -> list[int]:
    """The sampled tokens up to the first that is not what was proposed."""
    for count, token in enumerate(sampled[:-1], start=1):
        if token != drafts[count - 1]:
            return sampled[:count]
    return sampled


class Proposer:
    """Sets `drafts` of sequences that are about to decode; this one proposes nothing."""

    def start(self, sequence: Sequence, params: RowParams) -> None:
        """A sequence got a row, with these sampling parameters."""

    def finish(self, sequence: Sequence) -> None:
        """A sequence ended."""

    def propose(self, sequences: Items[Sequence]) -> None:
        """Set the drafts of sequences all of whose tokens are known."""

    def drafted(self, samples: Mapping[int, Sample]) -> Drafted | None:
        """What samples, by index in their plan, are to be checked against; None where drafts are
        not draws."""

    def reset(self) -> None:
        """Forget what was computed: the weights or the cache are others now."""

    def sleep(self) -> None:
        """Give memory of the cache back."""

    def wake(self) -> None:
        """Make an empty cache if it was given back."""


class NGramProposer(Proposer):
    """Proposes what followed the last tokens when they stood in the sequence before."""

    def __init__(self, config: NGram) -> None:
        self._config = config

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


class MTPProposer(Proposer):
    """Proposes what the model's own module for multi-token prediction finds most likely.

    The keys and values of the module's layer lie in the model's pages, as one layer more: what
    shares, takes back or drops a sequence's pages does so with them. A page that is shared may hold
    at its last place those for another next token, which can cost a proposal, never a token.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def propose(self, sequences: Items[Sequence]) -> None:
        """Let the module read the last step, then take what it proposes after it."""
        found = self._runner.draft()
        for sequence in sequences:
            sequence.drafts = []
        if found is None or not sequences:
            return
        plan, tokens_RK = found
        rows = {entry.sequence.id: row for row, entry in enumerate(plan.entries)}
        drafts = np.asarray(tokens_RK)
        for sequence in sequences:
            row = rows.get(sequence.id)
            if row is not None:  # one that was forked in that step is not there
                sequence.drafts = drafts[row, : self._room(sequence)].tolist()

    def reset(self) -> None:
        """Forget the last step."""
        self._runner.forget_step()

    def sleep(self) -> None:
        """Forget the last step; the cache is the model's."""
        self._runner.forget_step()

    def _room(self, sequence: Sequence) -> int:
        """Proposals for which the sequence's pages had places: one goes by the second last token,
        and each further one by the token after."""
        return self._runner.places(sequence) - (len(sequence.tokens) - 2)


@dataclass(frozen=True)
class _Seen:
    """How far the draft model got with a sequence, for as long as it keeps its row."""

    row: int
    known: int
    """Tokens that the sequence had."""
    drafts: list[int]
    """Tokens proposed after them."""
    places: range
    """Those with a proposal: of the drafts, and of the token after them."""
    kept: bool = True
    """Whether the cache still holds what was computed."""


class DraftProposer(Proposer):
    """Proposes what a smaller model samples.

    Its cache has pages of its own. Where they are short, sequences are proposed for one after the
    other: pages of those that wait are taken, and what they held is computed again.
    """

    def __init__(self, runner: Runner, num_tokens: int) -> None:
        self._runner = runner
        self._places = num_tokens + 1
        self._free = list(range(1, runner.limits.draft_pages))
        self._pages: dict[int, list[int]] = {}
        """By sequence; the one that was proposed for longest ago first."""
        self._kinds = range(len(runner.limits.num_pages))
        self._updates: list[PageUpdate] = []
        self._seen: dict[int, _Seen] = {}

    def start(self, sequence: Sequence, params: RowParams) -> None:
        """Give the draft model's sampler the same parameters."""
        if sequence.row is not None:
            self._runner.load_row(sequence.row, params)
            self.finish(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Forget the sequence."""
        self._seen.pop(sequence.id, None)
        self._free += self._pages.pop(sequence.id, ())

    def reset(self) -> None:
        """Compute all sequences again."""
        self._seen.clear()
        for sequence in list(self._pages):
            self._free += self._pages.pop(sequence)

    def sleep(self) -> None:
        """Give the cache's memory back."""
        self.reset()
        self._runner.executor.sleep()

    def wake(self) -> None:
        """Make the cache again."""
        self._runner.executor.wake()

    def propose(self, sequences: Items[Sequence]) -> None:
        """Bring the draft model up to each sequence's last token, then sample ahead."""
        self._sample_ahead(sequences, self._places)
        for sequence in sequences:
            seen = self._seen.get(sequence.id)
            sequence.drafts = [] if seen is None else list(seen.drafts)

    def drafted(self, samples: Mapping[int, Sample]) -> Drafted:
        """The proposals for all but first tokens; those of resumed sequences are made now."""
        later = {i: one for i, one in samples.items() if one.position > one.sequence.num_prompt}
        resumed = [one.sequence for one in later.values() if self._slot(one) is None]
        self._sample_ahead(resumed, 1)
        assert self._runner.executor.proposals is not None, "the runner was made for a draft model"
        slots = {i: self._slot(one) for i, one in later.items()}
        known = {i: slot for i, slot in slots.items() if slot is not None}
        return Drafted(self._runner.executor.proposals, known)

    def _slot(self, sample: Sample) -> int | None:
        seen = self._seen.get(sample.sequence.id)
        if seen is None or seen.row != sample.row or sample.position not in seen.places:
            return None
        return sample.position % self._places

    def _sample_ahead(self, sequences: Items[Sequence], places: int) -> None:
        """Make proposals for the next places of each sequence, as far as it may go."""
        for group in self._groups(sequences, places):
            self._hold(group, places)
            self._sample_group(group, places)

    def _groups(self, sequences: Items[Sequence], places: int) -> Iterator[list[Sequence]]:
        """As many sequences at a time as there are pages for."""
        group: list[Sequence] = []
        left = total = self._runner.limits.draft_pages - 1
        for sequence in sequences:
            need = self._need(sequence, places)
            if need > left:
                yield group
                group, left = [], total
            group.append(sequence)
            left -= need
        if group:
            yield group

    def _need(self, sequence: Sequence, places: int) -> int:
        """Pages for all tokens and proposals of a sequence."""
        limits = self._runner.limits
        return min(-(-(len(sequence.tokens) + places) // limits.page_size), limits.table_width)

    def _hold(self, group: Items[Sequence], places: int) -> None:
        """Get the pages that a group needs, from sequences outside it if there are none free."""
        held = {each.id: self._pages.pop(each.id, []) for each in group}
        for sequence in group:
            pages, row = held[sequence.id], sequence.row
            assert row is not None, "only running sequences are drafted for"
            if not pages and sequence.id in self._seen:
                self._seen[sequence.id] = replace(self._seen[sequence.id], kept=False)
            for index in range(len(pages), self._need(sequence, places)):
                while not self._free:
                    self._free += self._pages.pop(next(iter(self._pages)))
                pages.append(self._free.pop())
                self._updates += [
                    PageUpdate(kind, row, index, pages[index]) for kind in self._kinds
                ]
            self._pages[sequence.id] = pages

    def _sample_group(self, sequences: Items[Sequence], places: int) -> None:
        counts = {each.id: min(places, each.max_len - len(each.tokens)) for each in sequences}
        steps = [(sequences, self._catch_up(sequences))]
        for ahead in range(1, max(counts.values())):
            going = [each for each in sequences if counts[each.id] > ahead]
            plan = self._plan()
            for sequence in going:
                at = len(sequence.tokens) - 1 + ahead
                self._add(plan, sequence, range(at, at + 1), (ahead - 1, ahead), sample=True)
            steps.append((going, self._run(plan)))
        found: dict[int, list[int]] = {each.id: [] for each in sequences}
        for going, tokens in steps:
            for sequence, token in zip(going, np.asarray(tokens).tolist(), strict=False):
                found[sequence.id].append(token)
        for sequence in sequences:
            self._note(sequence, found[sequence.id])

    def _note(self, sequence: Sequence, tokens: list[int]) -> None:
        """Keep what was proposed, unless the draft model's logits were not finite."""
        self._seen.pop(sequence.id, None)
        if -1 not in tokens:
            known = len(sequence.tokens)
            places = range(known, known + len(tokens))
            self._seen[sequence.id] = _Seen(sequence.row or 0, known, tokens[:-1], places)

    def _catch_up(self, sequences: Items[Sequence]) -> jax.Array:
        """Compute all that the draft model has not seen; the last step samples for every one."""
        budget = self._runner.limits.max_num_batched_tokens
        done = {each.id: self._done(each) for each in sequences}
        states = {each.id: self._state(each, done[each.id]) for each in sequences}
        while sum(len(each.tokens) - done[each.id] for each in sequences) > budget:
            plan, room = self._plan(), budget
            for sequence in sequences:  # all but the last token, which samples
                start = done[sequence.id]
                count = min(room, len(sequence.tokens) - 1 - start)
                if count > 0:
                    stop, state = start + count, states.pop(sequence.id, 0)
                    self._add(plan, sequence, range(start, stop), (state, 0), sample=False)
                    done[sequence.id] = stop
                    room -= count
            self._runner.forward(plan)
        plan = self._plan()
        for sequence in sequences:
            own = range(done[sequence.id], len(sequence.tokens))
            self._add(plan, sequence, own, (states.pop(sequence.id, 0), 0), sample=True)
        return self._run(plan)

    def _plan(self) -> SchedulerOutput:
        """An empty step that brings what has changed in the page tables."""
        plan = SchedulerOutput(updates=self._updates)
        self._updates = []
        return plan

    def _done(self, sequence: Sequence) -> int:
        """Tokens that the draft model need not compute: known ones, and its own that stayed."""
        seen = self._seen.get(sequence.id)
        if seen is None or seen.row != sequence.row or not seen.kept:
            return 0
        stayed = takewhile(
            lambda pair: pair[0] == pair[1],
            zip(seen.drafts, sequence.tokens[seen.known :], strict=False),
        )
        done = min(seen.known + len(list(stayed)), len(sequence.tokens) - 1)
        # Of a state that layers keep there is none before that of the tokens that were known.
        return done if done >= seen.known or not self._runner.limits.state_versions else 0

    def _state(self, sequence: Sequence, done: int) -> int:
        """Which of its row's states is the one after `done` tokens: the first is of the tokens that
        were known, and each one more has the next."""
        seen = self._seen.get(sequence.id)
        return done - seen.known if done and seen is not None else 0

    def _add(
        self,
        plan: SchedulerOutput,
        sequence: Sequence,
        tokens: range,
        states: tuple[int, int],
        *,
        sample: bool,
    ) -> None:
        """Add an entry, which goes from one of its row's states to another."""
        row, (state, after) = sequence.row, states
        assert row is not None, "only running sequences are drafted for"
        entry = Entry(sequence, row, tokens.start, len(tokens), state=state, next_state=after)
        plan.entries.append(entry)
        plan.num_tokens += entry.count
        if sample:
            last = Sample(sequence, row, len(plan.entries) - 1, entry.count - 1, entry.stop)
            plan.samples.append(last)

    def _run(self, plan: SchedulerOutput) -> jax.Array:
        slots = {i: sample.position % self._places for i, sample in enumerate(plan.samples)}
        return self._runner.propose(plan, slots)
