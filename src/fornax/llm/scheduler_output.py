"""What one step of the engine does: which tokens go in, which are sampled, which pages move."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from fornax.llm.sequence import Sequence

__all__ = ["Entry", "PageCopy", "PageUpdate", "Sample", "SchedulerOutput", "StateCopy"]


@dataclass(slots=True)
class Entry:
    """Tokens [start, start + count) of a sequence go through the model."""

    sequence: Sequence
    row: int
    """The sequence's row in this step; `sequence.row` may have changed when results arrive."""
    start: int
    count: int
    drafts: int = 0
    """How many of them, the last ones, are `sequence.drafts[:drafts]`."""
    state: int = 0
    """Which of its row's states it continues from, where layers keep any."""
    next_state: int = 0
    """Which of them takes the state after it; with drafts the one after each of its tokens goes to
    another, from 0 on."""
    steps: int = 1
    """Steps of the call. After the first one the sequence continues with the token that it
    sampled."""

    @property
    def stop(self) -> int:
        """End of the range, further steps included; also the context length after them."""
        return self.start + self.count + self.steps - 1


@dataclass(slots=True)
class Sample:
    """A token to sample, or for a pooling sequence the hidden row to keep."""

    sequence: Sequence
    row: int
    entry: int
    """Index in `SchedulerOutput.entries`: for a forked sequence its parent's entry."""
    offset: int
    """Token of that entry whose hidden row is used."""
    position: int
    """Index in the sequence that the sampled token gets, the first of several."""


class PageCopy(NamedTuple):
    """A page to copy before the step, in every layer of the group."""

    group: int
    source: int
    target: int


class PageUpdate(NamedTuple):
    """One entry of a page table that changed: `table[group][row, index] = page`."""

    group: int
    row: int
    index: int
    page: int


class StateCopy(NamedTuple):
    """A slot of layers' states to copy, in every layer."""

    source: int
    target: int


@dataclass(slots=True)
class SchedulerOutput:
    """One call: a step, or several that decode the same sequences. Plans must run in the order they
    were made, and every plan must run."""

    entries: list[Entry] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    """Tokens to sample; the samples of one entry and sequence are adjacent, in order."""
    pooled: list[Sample] = field(default_factory=list)
    """Hidden rows that pooling sequences asked for."""
    copies: list[PageCopy] = field(default_factory=list)
    """Done before the step writes anything, in this order (or reading all before writing any)."""
    restored: list[StateCopy] = field(default_factory=list)
    """Kept states to rows, done before the step, one after the other."""
    kept: list[StateCopy] = field(default_factory=list)
    """States of rows to keep, done after the step, one after the other."""
    updates: list[PageUpdate] = field(default_factory=list)
    """Everything that changed in the page tables since the last plan, in order."""
    forks: dict[int, int] = field(default_factory=dict)
    """Row of a forked sequence to its parent's, whose state it takes over after the step; to be
    done in this order."""
    started: list[Sequence] = field(default_factory=list)
    """Sequences that got a row: admitted, resumed or forked."""
    preempted: list[Sequence] = field(default_factory=list)
    """Sequences pushed out of the cache since the last plan."""
    num_tokens: int = 0
    """Sum of the entries' counts: tokens of a step."""
    prefix_queries: int = 0
    """Tokens of new sequences looked up in the prefix cache."""
    prefix_hits: int = 0
    """Of these, tokens found."""

    @property
    def steps(self) -> int:
        """Steps of the call."""
        return self.entries[0].steps

    @property
    def prompt_tokens(self) -> int:
        """Of the step's tokens, those of prompts."""
        return sum(
            max(0, min(entry.stop, entry.sequence.num_prompt) - entry.start)
            for entry in self.entries
        )

    @property
    def is_decode(self) -> bool:
        """Whether each token of the step is the last of its sequence, after its prompt, and the
        next one is sampled from it and nothing else."""
        return (
            len(self.samples) == len(self.entries) == self.num_tokens
            and not self.pooled
            and all(
                sample.entry == index
                and sample.sequence is entry.sequence
                and entry.start >= entry.sequence.num_prompt
                for index, (sample, entry) in enumerate(
                    zip(self.samples, self.entries, strict=True)
                )
            )
        )

    @property
    def adapters(self) -> dict[int, str]:
        """Index of an entry to the name of its adapter, if it has one."""
        named = ((i, entry.sequence.lora) for i, entry in enumerate(self.entries))
        return {index: name for index, name in named if name}

    def sample_runs(self) -> Iterator[tuple[int, int]]:
        """First index and count of the adjacent samples of each sequence."""
        first = 0
        for _, group in itertools.groupby(self.samples, key=lambda sample: sample.sequence.id):
            count = len(list(group))
            yield first, count
            first += count
