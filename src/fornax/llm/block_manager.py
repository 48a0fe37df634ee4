"""The paged cache: prefix reuse, allocation, copy-on-write, sliding windows, release.

Of a model whose layers keep states a beginning is reused where its pages end and a state is kept.
"""

import hashlib
import sys
from array import array
from collections import OrderedDict
from collections.abc import Sequence as Items
from dataclasses import dataclass

from fornax.llm.scheduler_output import Entry, PageCopy, PageUpdate, SchedulerOutput, StateCopy
from fornax.llm.sequence import HeldState, Sequence
from fornax.llm.state_pool import StatePool

__all__ = ["BlockManager", "Match", "PagePool"]


class PagePool:
    """Pages 1 to num_pages - 1 of one cache array, of the layers that share a window and so a page
    table; page 0 takes the writes of padding tokens.

    A page is held (by one or more sequences), idle (held by none, but its content is a known
    prefix that may be asked for again) or blank. Blank pages are given out first, then idle ones,
    the least recently released first.
    """

    __slots__ = (
        "_blank",
        "_idle",
        "by_digest",
        "digests",
        "holders",
        "num_pages",
        "states",
        "window",
    )

    def __init__(self, num_pages: int, window: int | None = None) -> None:
        """Make a pool of `num_pages`, page 0 included, for layers whose queries see `window` keys,
        their own included, or all."""
        self.num_pages = num_pages
        self.window = window
        self.states: StatePool | None = None
        """Which lose a state with the page that it is after."""
        self.holders = [0] * num_pages
        self.digests: list[bytes | None] = [None] * num_pages
        self.by_digest: dict[bytes, int] = {}
        self._blank = list(range(num_pages - 1, 0, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def available(self) -> int:
        """Pages that `take` can give."""
        return len(self._blank) + len(self._idle)

    @property
    def used(self) -> int:
        """Pages that are held."""
        return self.num_pages - 1 - self.available

    def take(self) -> int:
        """Give out a page with one holder; its content is no longer known."""
        if self._blank:
            page = self._blank.pop()
        else:
            page, _ = self._idle.popitem(last=False)
            digest = self.digests[page]
            assert digest is not None, "an idle page has a digest"
            del self.by_digest[digest]
            self.digests[page] = None
            if self.states is not None:
                self.states.drop(digest)
        self.holders[page] = 1
        return page

    def hold(self, page: int) -> None:
        """Add a holder to a page that is held or idle."""
        if self.holders[page] == 0:
            del self._idle[page]
        self.holders[page] += 1

    def release(self, page: int) -> None:
        """Take a holder away."""
        self.holders[page] -= 1
        if self.holders[page] == 0:
            if self.digests[page] is None:
                self._blank.append(page)
            else:
                self._idle[page] = None

    def register(self, page: int, digest: bytes) -> None:
        """Say that a held page is full and what it holds; the first page of a digest is found."""
        if digest not in self.by_digest:
            self.by_digest[digest] = page
            self.digests[page] = digest

    def forget(self) -> None:
        """Forget what every page holds; holders keep theirs."""
        self.by_digest.clear()
        self.digests = [None] * self.num_pages
        self._blank.extend(self._idle)
        self._idle.clear()


@dataclass(frozen=True, slots=True)
class Match:
    """What the prefix cache has of a sequence."""

    num_tokens: int
    pages: list[list[int]]
    """For each group; 0 where the next query does not see the page."""
    num_shared: int
    """Tokens whose pages are there, `num_tokens` or, where no state is kept, more."""


class BlockManager:
    """Gives pages to sequences. A page is written only by its one holder, and only while it is
    not full: full pages of known tokens are registered under a digest that chains salt, all
    earlier tokens and their own, and from then on are only read.

    States are kept at ends of pages: where a chunk of a prompt ends, which is cut so that it does;
    at the last such place of a prompt; where a sequence leaves a beginning that others had before;
    and the last one that a sequence passed while it decoded, in place of the one before.
    """

    def __init__(
        self,
        pools: Items[PagePool],
        page_size: int,
        prefix_caching: bool = True,
        states: StatePool | None = None,
    ) -> None:
        """Manage the pages of each group, and the slots of layers' states if there are any."""
        self.page_size = page_size
        self.prefix_caching = prefix_caching
        self.pools = pools
        """By group."""
        self.states = states
        for pool in pools:
            pool.states = states

    @property
    def usage(self) -> float:
        """Share of the pages that sequences hold, 0 to 1, of the fullest group; 0 without one."""
        return max((pool.used / (pool.num_pages - 1) for pool in self.pools), default=0.0)

    def shortage(self, num_tokens: int) -> str | None:
        """Say why a sequence of `num_tokens` could not run even alone; None if it can."""
        for pool in self.pools:
            need = self._pages_of(num_tokens)
            if pool.window is not None:
                need = min(need, self._span(pool.window))
            if need > pool.num_pages - 1:
                return (
                    f"{need} pages of {self.page_size} tokens, the cache has {pool.num_pages - 1}"
                )
        return None

    def match(self, sequence: Sequence) -> Match:
        """Find the longest prefix of whole pages in the cache; the last token is never part."""
        most = (len(sequence.tokens) - 1) // self.page_size
        if not self.prefix_caching or not sequence.reads_cache or most <= 0:
            return Match(0, [[] for _ in self.pools], 0)
        digests = self._digests(sequence, most)
        found = most
        for pool in self.pools:
            if pool.window is None:
                for index in range(found):
                    if digests[index] not in pool.by_digest:
                        found = index
                        break
        shared = found = self._match_windows(digests, found)
        if self.states is not None:
            found = self._match_states(self.states, digests, found)
        pages = []
        for pool in self.pools:
            first = self._first_visible(found * self.page_size, pool.window)
            pages.append([0] * first + [pool.by_digest[digest] for digest in digests[first:found]])
        return Match(found * self.page_size, pages, shared * self.page_size)

    def spare(self, headroom: int) -> list[int]:
        """Pages of each group that new sequences may claim, `headroom` left to running ones where
        these grow without limit."""
        return [pool.available - (headroom if pool.window is None else 0) for pool in self.pools]

    def claim(self, sequence: Sequence, match: Match, spare: list[int]) -> bool:
        """Subtract from `spare` what the sequence needs to be computed; False if not there."""
        total = self._pages_of(sequence.length)
        wanted = []
        for pool, hits in zip(self.pools, match.pages, strict=True):
            live = [page for page in hits if page]
            idle = sum(pool.holders[page] == 0 for page in live)
            need = total - (len(hits) - len(live))
            if pool.window is not None:
                need = min(need, self._span(pool.window))
            wanted.append(max(idle, need - (len(live) - idle)))
        if any(want > have for want, have in zip(wanted, spare, strict=True)):
            return False
        for group, want in enumerate(wanted):
            spare[group] -= want
        return True

    def admit(self, sequence: Sequence, match: Match, plan: SchedulerOutput) -> None:
        """Give a sequence that was just claimed for its row's pages: those matched, and, in groups
        without a window, one for each of its tokens."""
        sequence.pages = match.pages
        sequence.first_live = []
        for pool, pages in zip(self.pools, match.pages, strict=True):
            live = next((index for index, page in enumerate(pages) if page), len(pages))
            sequence.first_live.append(live)
            for page in pages[live:]:
                pool.hold(page)
        total = self._pages_of(sequence.length)
        for pool, pages in zip(self.pools, match.pages, strict=True):
            if pool.window is None:
                pages.extend(pool.take() for _ in range(total - len(pages)))
        sequence.num_computed = match.num_tokens
        sequence.num_registered = match.num_tokens // self.page_size
        sequence.num_shared = match.num_shared
        if self.states is not None and match.num_tokens:
            slot = self.states.use(sequence.page_digests[sequence.num_registered - 1])
            assert sequence.row is not None, "only running sequences are admitted"
            plan.restored.append(StateCopy(slot, self.states.slot_of(sequence.row)))
        self._write_tables(sequence, plan)

    def room(self, sequence: Sequence, plan: SchedulerOutput) -> int:
        """Tokens after `num_computed` that pages can be had for now."""
        self._trim(sequence, sequence.num_computed, plan)
        groups = zip(self.pools, sequence.pages, strict=True)
        pages = min(
            (len(pages) + pool.available for pool, pages in groups),
            default=self._pages_of(sequence.length),
        )
        return pages * self.page_size - sequence.num_computed

    def extend(self, sequence: Sequence, start: int, stop: int, plan: SchedulerOutput) -> bool:
        """Make tokens [start, stop) writable: new pages, own copies of shared ones. False, with
        nothing taken, when pages are short."""
        self._trim(sequence, start, plan)
        size = self.page_size
        first = start // size
        total = (stop - 1) // size + 1
        changed = False
        for pool, pages in zip(self.pools, sequence.pages, strict=True):
            held = len(pages)
            missing = total - held if total > held else 0
            if first < held and pool.holders[pages[first]] > 1:
                missing += 1
            if missing:
                if missing > pool.available:
                    return False
                changed = True
        if changed:
            self._take(sequence, first, total, plan)
        return True

    def has_room(self, sequences: Items[Sequence], count: int) -> bool:
        """Whether all sequences can be extended by `count` tokens at once."""
        for group, pool in enumerate(self.pools):
            missing = 0
            for sequence in sequences:
                start, pages = sequence.num_computed, sequence.pages[group]
                missing += max(0, self._pages_of(start + count) - len(pages))
                first = start // self.page_size
                missing += first < len(pages) and pool.holders[pages[first]] > 1
            if missing > pool.available:
                return False
        return True

    def until_kept(self, sequence: Sequence) -> int:
        """Tokens after `num_computed` up to where a state is to be kept; many if none is."""
        if not self._keeps_states:
            return sys.maxsize
        return self.page_size - sequence.num_computed % self.page_size

    def fork(self, parent: Sequence, child: Sequence, plan: SchedulerOutput) -> None:
        """Let the child hold all of its parent's pages."""
        child.pages = [list(pages) for pages in parent.pages]
        child.first_live = list(parent.first_live)
        for pool, pages, live in zip(self.pools, child.pages, child.first_live, strict=True):
            for page in pages[live:]:
                pool.hold(page)
        child.num_computed = parent.num_computed
        child.num_registered = parent.num_registered
        child.page_digests = list(parent.page_digests)
        self._write_tables(child, plan)

    def chunk(self, sequence: Sequence, count: int) -> int:
        """How many of the next `count` tokens of a prompt to compute in one step: they end where a
        state is to be kept, if they can."""
        if not self._keeps_states:
            return count
        size, start = self.page_size, sequence.num_computed
        stop = start + count
        ends = [sequence.num_shared, (sequence.length - 1) // size * size]
        if stop < sequence.length:
            ends.append(stop // size * size)
        return min((end for end in ends if start < end < stop), default=stop) - start

    def keep_state(self, sequence: Sequence, entry: Entry, plan: SchedulerOutput) -> None:
        """Keep a copy of the state that a step leaves at the end of a page, if it passes one and a
        slot can be had. To be called after `commit`: the copy is there for later steps only."""
        if self.states is None or not self._keeps_states:
            return
        size, drafts = self.page_size, entry.drafts
        end = (entry.start // size + 1) * size if drafts else entry.stop
        if end % size or end > entry.stop:
            return
        decodes = entry.stop >= sequence.length
        slot = self._slot_for(self.states, sequence, end // size, decodes)
        if slot is None:
            return
        sequence.held_state = HeldState(slot, end // size, decodes)
        version = end - entry.start - 1 if drafts else 0
        plan.kept.append(StateCopy(self.states.slot_of(entry.row, version), slot))

    def commit(self, sequence: Sequence) -> None:
        """Register the pages that are full of known and computed tokens, and the state kept after
        one of them."""
        known = min(sequence.num_computed, len(sequence.tokens)) // self.page_size
        held = sequence.held_state
        if self.states is not None and held is not None and held.num_pages <= known:
            digest = self._digests(sequence, known)[held.num_pages - 1]
            self.states.name(held.slot, digest)
            sequence.held_state = None
            sequence.decode_state = digest if held.decodes else None
        if known <= sequence.num_registered or not self.prefix_caching:
            return
        digests = self._digests(sequence, known)
        for pool, pages in zip(self.pools, sequence.pages, strict=True):
            for index in range(sequence.num_registered, known):
                if pages[index]:
                    pool.register(pages[index], digests[index])
        sequence.num_registered = known

    def free(self, sequence: Sequence) -> None:
        """Release all pages, the last first, so that the cache loses the ends of prefixes first."""
        if self.states is not None:
            self.commit(sequence)
            if sequence.held_state is not None:
                self.states.give_back(sequence.held_state.slot)
            sequence.held_state = sequence.decode_state = None
        for pool, pages, live in zip(self.pools, sequence.pages, sequence.first_live, strict=True):
            for index in range(len(pages) - 1, live - 1, -1):
                pool.release(pages[index])
        sequence.pages = []
        sequence.first_live = []
        sequence.num_computed = 0
        sequence.num_registered = 0
        sequence.num_shared = 0

    def reset_prefix_cache(self) -> None:
        """Forget every known prefix; pages in use stay with their sequences."""
        for pool in self.pools:
            pool.forget()
        if self.states is not None:
            self.states.forget()

    @property
    def _keeps_states(self) -> bool:
        return self.prefix_caching and self.states is not None and self.states.num_kept > 0

    def _slot_for(
        self, states: StatePool, sequence: Sequence, num_pages: int, decodes: bool
    ) -> int | None:
        """A slot to keep a sequence's next state in; None if there is none, or no need of one."""
        held = sequence.held_state
        if held is not None:  # what it is of is not known yet, and the next one is worth more
            return held.slot
        if decodes:
            if sequence.decode_state is not None:
                states.drop(sequence.decode_state)
                sequence.decode_state = None
        elif (digest := self._digests(sequence, num_pages)[num_pages - 1]) in states:
            states.use(digest)
            return None
        return states.take()

    def _take(self, sequence: Sequence, first: int, total: int, plan: SchedulerOutput) -> None:
        row = sequence.row
        assert row is not None, "only running sequences get pages"
        for group, pool in enumerate(self.pools):
            pages = sequence.pages[group]
            if first < len(pages) and pool.holders[pages[first]] > 1:
                source = pages[first]
                pages[first] = pool.take()
                pool.release(source)
                plan.copies.append(PageCopy(group, source, pages[first]))
                plan.updates.append(PageUpdate(group, row, first, pages[first]))
            for index in range(len(pages), total):
                pages.append(pool.take())
                plan.updates.append(PageUpdate(group, row, index, pages[index]))

    def _trim(self, sequence: Sequence, start: int, plan: SchedulerOutput) -> None:
        """Release what no query from `start` on can see."""
        row = sequence.row
        assert row is not None, "only running sequences have pages"
        for group, pool in enumerate(self.pools):
            if (window := pool.window) is None:
                continue
            pages = sequence.pages[group]
            live = sequence.first_live[group]
            visible = min((start - window + 1) // self.page_size, len(pages))
            if visible > live:
                for index in range(live, visible):
                    pool.release(pages[index])
                    pages[index] = 0
                    plan.updates.append(PageUpdate(group, row, index, 0))
                sequence.first_live[group] = visible

    def _write_tables(self, sequence: Sequence, plan: SchedulerOutput) -> None:
        row = sequence.row
        assert row is not None, "only running sequences have pages"
        for group, pages in enumerate(sequence.pages):
            plan.updates.extend(
                PageUpdate(group, row, index, page) for index, page in enumerate(pages)
            )

    def _match_states(self, states: StatePool, digests: list[bytes], found: int) -> int:
        """The longest prefix of at most `found` pages after which a state is kept, and whose last
        window every group has."""
        for count in range(found, 0, -1):
            if digests[count - 1] in states and self._match_windows(digests, count) == count:
                return count
        return 0

    def _match_windows(self, digests: list[bytes], found: int) -> int:
        """The longest prefix of at most `found` pages whose last window every group has."""
        settled = False
        while found and not settled:
            settled = True
            for pool in self.pools:
                if pool.window is None:
                    continue
                fitting = self._match_window(pool, pool.window, digests, found)
                settled = settled and fitting == found
                found = fitting
        return found

    def _match_window(self, pool: PagePool, window: int, digests: list[bytes], found: int) -> int:
        index = found - 1
        while found and index >= self._first_visible(found * self.page_size, window):
            if digests[index] not in pool.by_digest:
                found = index
            index -= 1
        return found

    def _first_visible(self, start: int, window: int | None) -> int:
        """Index of the first page that a query at `start` sees."""
        return 0 if window is None else max(0, (start - window + 1) // self.page_size)

    def _pages_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def _span(self, window: int) -> int:
        """Most pages that one query's window touches."""
        return (window - 2) // self.page_size + 2

    def _digests(self, sequence: Sequence, count: int) -> list[bytes]:
        """Digests of the first `count` pages; 32 bytes, so equal digests mean equal tokens."""
        digests = sequence.page_digests
        size = self.page_size
        for index in range(len(digests), count):
            before = digests[-1] if digests else hashlib.blake2b(sequence.salt).digest()
            page = array("I", sequence.tokens[index * size : (index + 1) * size])
            digests.append(hashlib.blake2b(before + page.tobytes(), digest_size=32).digest())
        return digests
