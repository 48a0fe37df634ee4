"""What one step of the engine does: which tokens go in, which are sampled, which pages move."""

from dataclasses import dataclass, field
from typing import NamedTuple

from fornax.llm.sequence import Sequence

__all__ = ["Entry", "PageCopy", "PageUpdate", "Plan", "Sample"]


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

    @property
    def stop(self) -> int:
        """End of the range; also the context length after the step."""
        return self.start + self.count


@dataclass(slots=True)
class Sample:
    """A token to sample, or for a pooling sequence the hidden row to keep."""

    sequence: Sequence
    row: int
    entry: int
    """Index in `Plan.entries`: for a forked sequence its parent's entry."""
    offset: int
    """Token of that entry whose hidden row is used."""
    position: int
    """Index in the sequence that the sampled token gets."""


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


@dataclass(slots=True)
class Plan:
    """One step. Plans must run in the order they were made, and every plan must run."""

    entries: list[Entry] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    """Tokens to sample; the samples of one entry and sequence are adjacent, in order."""
    pooled: list[Sample] = field(default_factory=list)
    """Hidden rows that pooling sequences asked for."""
    copies: list[PageCopy] = field(default_factory=list)
    """Done before the step writes anything, in this order (or reading all before writing any)."""
    updates: list[PageUpdate] = field(default_factory=list)
    """Everything that changed in the page tables since the last plan, in order."""
    started: list[Sequence] = field(default_factory=list)
    """Sequences that got a row: admitted, resumed or forked."""
    preempted: list[Sequence] = field(default_factory=list)
    """Sequences pushed out of the cache since the last plan."""
    num_tokens: int = 0
    """Sum of the entries' counts."""
    prefix_queries: int = 0
    """Tokens of new sequences looked up in the prefix cache."""
    prefix_hits: int = 0
    """Of these, tokens found."""
