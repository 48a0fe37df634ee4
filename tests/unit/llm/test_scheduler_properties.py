"""Any order of add, step, result, abort, preemption, fork and reset, on a simulated device.

The device keeps in every cache slot a digest of the whole prefix that ends there, so a page that is
shared, freed, copied or written wrongly shows as a wrong digest when a query reads it; the token it
samples follows from the digest, so a wrong step also shows as a wrong token. A slot of states keeps
the digest of all tokens that its state is of.
"""

from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fornax.config.errors import EngineError
from fornax.llm.block_manager import BlockManager, PagePool
from fornax.llm.scheduler import Scheduler, SchedulerConfig
from fornax.llm.scheduler_output import Entry, SchedulerOutput
from fornax.llm.sequence import Sequence, Status
from fornax.llm.state_pool import StatePool

VOCABULARY = 3
DRAFTS = 4


def chain(salt: bytes, tokens: list[int]) -> list[int]:
    digests = []
    digest = hash(salt)
    for token in tokens:
        digest = hash((digest, token))
        digests.append(digest)
    return digests


def next_token(digest: int, seed: int) -> int:
    return hash((digest, seed)) % VOCABULARY


def oracle(sequence: Sequence, seed: int, length: int) -> list[int]:
    """What decoding one token at a time, with no cache, gives."""
    tokens = list(sequence.prompt)
    digests = chain(sequence.salt, tokens)
    while len(tokens) < length:
        tokens.append(next_token(digests[-1], seed))
        digests.append(hash((digests[-1], tokens[-1])))
    return tokens


@dataclass
class Result:
    plan: SchedulerOutput
    sampled: dict[Sequence, list[int]] = field(default_factory=dict)


class Device:
    def __init__(self, manager: BlockManager, rows: int) -> None:
        self.manager = manager
        self.cache = [[{} for _ in range(group.num_pages)] for group in manager.pools]
        self.table = [[{} for _ in range(rows)] for _ in manager.pools]
        self.states: dict[int, int] = {}
        self.last_token = [-1] * rows
        self.pending: dict[Sequence, list[int]] = {}

    def run(self, plan: SchedulerOutput, running: list[Sequence]) -> Result:
        self.running = running
        for group, row, index, page in plan.updates:
            self.table[group][row][index] = page
        assert len({(copy.group, copy.target) for copy in plan.copies}) == len(plan.copies)
        for group, source, target in plan.copies:
            self.cache[group][target] = dict(self.cache[group][source])
        if self.manager.states is None:
            assert not plan.restored
            assert not plan.kept
        for source, target in plan.restored:
            self.states[target] = self.states[source]
        result = Result(plan)
        for index in range(plan.steps):
            self.step(plan, index, result)
        for source, target in plan.kept:
            self.states[target] = self.states[source]
        if (states := self.manager.states) is not None:
            for child, row in plan.forks.items():
                self.states[states.slot_of(child)] = self.states[states.slot_of(row)]
        return result

    def step(self, plan: SchedulerOutput, index: int, result: Result) -> None:
        """One of a call's steps: all but the first read what the one before sampled."""
        assert all(each.steps == plan.steps for each in plan.entries)
        entries = [replace(each, start=each.start + index, steps=1) for each in plan.entries]
        chains = [chain(each.sequence.salt, self.inputs(each)) for each in entries]
        self.carry_states(entries, chains)
        self.write(entries, chains)
        for entry, digests in zip(entries, chains, strict=True):
            self.read(entry, digests)
        self.sample(plan, entries, index, chains, result)

    def inputs(self, entry) -> list[int]:
        sequence = entry.sequence
        known = entry.stop - entry.drafts
        tokens = sequence.tokens[:known] + sequence.drafts[: entry.drafts]
        if len(tokens) < entry.stop:  # the rest is known to the device only
            assert entry.count == 1
            tokens += self.pending[sequence]
            assert tokens[-1] == self.last_token[entry.row]
        assert len(tokens) == entry.stop
        return tokens

    def carry_states(self, entries: list[Entry], chains: list[list[int]]) -> None:
        """Continue from each sequence's state; all are read before any is written."""
        if (states := self.manager.states) is None:
            return
        for entry, digests in zip(entries, chains, strict=True):
            if entry.start:
                found = self.states[states.slot_of(entry.row, entry.state)]
                assert found == digests[entry.start - 1], "a sequence continues from another state"
        for entry, digests in zip(entries, chains, strict=True):
            versions = range(entry.count) if entry.drafts else (entry.next_state,)
            ends = range(entry.start, entry.stop) if entry.drafts else (entry.stop - 1,)
            for version, end in zip(versions, ends, strict=True):
                self.states[states.slot_of(entry.row, version)] = digests[end]

    def write(self, entries: list[Entry], chains: list[list[int]]) -> None:
        written = set()
        size = self.manager.page_size
        for entry, digests in zip(entries, chains, strict=True):
            for group, pool in enumerate(self.manager.pools):
                for position in range(entry.start, entry.stop):
                    page = self.table[group][entry.row][position // size]
                    slot = (group, page, position % size)
                    assert page != 0, "page 0 belongs to padding"
                    if pool.holders[page] > 1:
                        self.check_common(entry, group, position)
                    assert slot not in written, "two sequences write one slot"
                    written.add(slot)
                    self.cache[group][page][position % size] = digests[position]

    def check_common(self, entry, group: int, position: int) -> None:
        """A page is written while others hold it only in the step that computes their common
        prompt: what is written is theirs too."""
        index = position // self.manager.page_size
        page = entry.sequence.pages[group][index]
        mine = entry.sequence.tokens[: position + 1]
        assert len(mine) == position + 1
        for other in self.running:
            if len(other.pages[group]) > index and other.pages[group][index] == page:
                assert other.tokens[: position + 1] == mine, "a shared page is written"
                assert other.num_computed > position

    def read(self, entry, digests: list[int]) -> None:
        size = self.manager.page_size
        for group, spec in enumerate(self.manager.pools):
            first = 0 if spec.window is None else max(0, entry.start - spec.window + 1)
            for position in range(first, entry.stop):
                page = self.table[group][entry.row][position // size]
                assert page == entry.sequence.pages[group][position // size]
                assert self.cache[group][page][position % size] == digests[position]

    def sample(
        self,
        plan: SchedulerOutput,
        entries: list[Entry],
        index: int,
        chains: list[list[int]],
        result: Result,
    ) -> None:
        for sample in plan.samples:
            entry = entries[sample.entry]
            assert sample.position + index == entry.start + sample.offset + 1
            assert sample.row == sample.sequence.row
            token = next_token(
                chains[sample.entry][entry.start + sample.offset], sample.sequence.id
            )
            result.sampled.setdefault(sample.sequence, []).append(token)
            self.last_token[sample.row] = token
            self.pending.setdefault(sample.sequence, []).append(token)


class Engine(RuleBasedStateMachine):
    """What an engine does with the scheduler, with up to three steps on their way."""

    @initialize(
        page_size=st.sampled_from([1, 2, 3, 4]),
        groups=st.lists(
            st.tuples(st.integers(8, 30), st.sampled_from([None, None, 1, 2, 3, 5, 9])),
            min_size=1,
            max_size=3,
        ),
        prefix_caching=st.booleans(),
        max_num_seqs=st.integers(1, 5),
        tokens=st.integers(0, 20),
        policy=st.sampled_from(["fcfs", "priority"]),
        threshold=st.sampled_from([0, 0, 1, 4]),
        partial=st.integers(1, 3),
        buckets=st.sampled_from([(), (1, 2, 4, 8, 100, 200), (1, 8, 150)]),
        kept=st.sampled_from([None, 0, 1, 2, 5, 20]),
    )
    def build(
        self, page_size, groups, prefix_caching, max_num_seqs, tokens, policy, threshold, partial,
        buckets, kept,
    ):  # fmt: skip
        self.manager = BlockManager(
            [PagePool(pages, window) for pages, window in groups],
            page_size,
            prefix_caching,
            None if kept is None else StatePool(max_num_seqs, 1 + DRAFTS, kept),
        )
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_seqs + tokens,
                policy=policy,
                priority_aging_seconds=3.0,
                long_prefill_token_threshold=threshold,
                max_num_partial_prefills=partial,
                max_loras=2,
                buckets=buckets,
            ),
            self.manager,
        )
        self.device = Device(self.manager, max_num_seqs)
        self.flight: list[Result] = []
        self.sequences: list[Sequence] = []
        self.clock = 0
        self.last: dict = {}

    @rule(
        shared=st.integers(0, 12),
        own=st.lists(st.integers(0, 1), max_size=4),
        output=st.integers(1, 12),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        priority=st.integers(-2, 2),
        lora=st.sampled_from([None, None, "a", "b", "c"]),
        reads_cache=st.booleans(),
        pooling=st.sampled_from([False, False, False, True]),
    )
    def add(self, shared, own, output, n, priority, lora, reads_cache, pooling):
        prompt = [0, *([1, 2, 0] * 4)[:shared], *own]
        self.clock += 1
        made = [
            Sequence(
                id=len(self.sequences) + index,
                request_id=str(self.clock),
                prompt=prompt,
                max_len=len(prompt) + (0 if pooling else output),
                priority=priority,
                arrival=float(self.clock),
                salt=b"" if lora is None else lora.encode(),
                lora=lora,
                reads_cache=reads_cache or index > 0,
                pooling=pooling,
            )
            for index in range(1 if pooling else n)
        ]
        made[0].children = made[1:]
        try:
            self.scheduler.add(made[0])
        except EngineError:
            assert self.manager.shortage(made[0].max_len) is not None
            return
        self.sequences += made

    @precondition(lambda self: self.scheduler.has_work and len(self.flight) < 3)
    @rule(
        proposals=st.lists(st.integers(0, 2), max_size=DRAFTS),
        honest=st.booleans(),
        steps=st.integers(1, 6),
    )
    def step(self, proposals, honest, steps):
        for sequence in self.scheduler.running:
            if not sequence.num_pending and not sequence.pooling and proposals:
                truth = oracle(sequence, sequence.id, len(sequence.tokens) + len(proposals))
                sequence.drafts = truth[len(sequence.tokens) :] if honest else list(proposals)
        first = min(self.scheduler.running, key=lambda each: each.order, default=None)
        self.last = {}
        waiting = bool(self.scheduler.waiting)
        plan = self.scheduler.schedule(steps)
        if plan is None:
            assert self.flight or not self.scheduler.has_work, "nothing runs and nothing comes"
            return
        assert first is None or first.status is Status.RUNNING, "the first in order was preempted"
        self.last = {entry.sequence: entry for entry in plan.entries}
        self.check(plan)
        assert plan.steps <= (1 if waiting else steps)
        self.flight.append(self.device.run(plan, self.scheduler.running))

    def check(self, plan: SchedulerOutput) -> None:
        config = self.scheduler.config
        assert plan.num_tokens == sum(entry.count for entry in plan.entries)
        assert 0 < plan.num_tokens <= config.max_num_batched_tokens
        assert all(entry.count > 0 for entry in plan.entries)
        assert max(Counter(id(entry.sequence) for entry in plan.entries).values()) == 1
        assert all(entry.row == entry.sequence.row for entry in plan.entries)
        assert 0 <= plan.prefix_hits <= plan.prefix_queries
        for sequence in self.scheduler.running:
            assert sequence.length <= sequence.max_len
        unlimited = all(group.window is None for group in self.manager.pools)
        if unlimited and self.manager.states is None:  # chunks are cut where states are kept
            partial = [each for each in self.scheduler.running if each.remaining > 1]
            assert len(partial) <= config.max_num_partial_prefills

    @precondition(lambda self: self.flight)
    @rule()
    def process(self):
        result = self.flight.pop(0)
        plan = result.plan
        drafts = {entry.sequence: entry.drafts for entry in plan.entries}
        for sequence, sampled in result.sampled.items():
            del self.device.pending[sequence][: len(sampled)]
            proposed = sequence.drafts[: drafts.get(sequence, 0)]
            count = plan.steps
            while count <= len(proposed) and proposed[count - 1] == sampled[count - 1]:
                count += 1
            self.scheduler.received(sequence, sampled[:count], len(sampled))
            if sequence.status is not Status.FINISHED:
                assert sequence.tokens == oracle(sequence, sequence.id, len(sequence.tokens))
                if len(sequence.tokens) == sequence.max_len:
                    self.scheduler.finish(sequence)
        for sample in plan.pooled:
            self.scheduler.finish(sample.sequence)

    @precondition(lambda self: self.sequences)
    @rule(which=st.integers(0, 30))
    def abort(self, which):
        self.scheduler.finish(self.sequences[which % len(self.sequences)])

    @rule(prefixes_only=st.sampled_from([True, True, False]), rarely=st.integers(0, 4))
    def reset(self, prefixes_only, rarely):
        if rarely:
            return
        if prefixes_only:
            self.manager.reset_prefix_cache()
            return
        self.scheduler.reset()
        assert not any(pool.used or pool.by_digest for pool in self.manager.pools)

    @invariant()
    def every_page_is_accounted_for(self):
        for group, pool in enumerate(self.manager.pools):
            held = Counter(
                page for each in self.sequences if each.pages for page in each.pages[group] if page
            )
            assert pool.holders == [held[page] for page in range(pool.num_pages)]
            assert pool.used == len(held)
            known = {page: digest for digest, page in pool.by_digest.items()}
            assert pool.digests == [known.get(page) for page in range(pool.num_pages)]

    @invariant()
    def every_kept_state_is_accounted_for(self):
        if (states := self.manager.states) is None:
            return
        held = [each.held_state.slot for each in self.sequences if each.held_state is not None]
        known = list(states._known.values())
        first = states.slot_of(self.scheduler.config.max_num_seqs)
        every = range(first, first + states.num_kept)
        assert sorted((*held, *known, *states._blank)) == list(every)

    @invariant()
    def sliding_groups_keep_only_the_window(self):
        size = self.manager.page_size
        for each in self.scheduler.running:
            held = zip(self.manager.pools, each.pages, each.first_live, strict=True)
            for group, pages, live in held:
                assert not any(pages[:live])
                assert all(pages[live:])
                if group.window is not None:
                    assert live <= each.num_computed // size
                    entry = self.last.get(each)
                    if entry is not None:
                        assert live == max(0, (entry.start - group.window + 1) // size)

    @invariant()
    def every_sequence_is_in_one_place(self):
        running, waiting = self.scheduler.running, self.scheduler.waiting
        assert len(running) <= self.scheduler.config.max_num_seqs
        assert len({each.row for each in running}) == len(running)
        assert [each.order for each in running] == sorted(each.order for each in running)
        assert [each.order for each in waiting] == sorted(each.order for each in waiting)
        children = [child for each in (*running, *waiting) for child in each.children]
        places = Counter(id(each) for each in (*running, *waiting, *children))
        for each in self.sequences:
            finished = each.status is Status.FINISHED
            assert finished or places[id(each)] == 1
            assert (each.status is Status.RUNNING) == (each in running)
            assert (each.row is not None) == (each.status is Status.RUNNING)
        adapters = {each.lora for each in running if each.lora is not None}
        assert set(self.scheduler.running_loras) == adapters
        assert len(adapters) <= self.scheduler.config.max_loras

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        most = 50 + 4 * sum(each.max_len for each in self.sequences)
        for _ in range(most):
            if not self.scheduler.has_work and not self.flight:
                break
            if len(self.flight) < 2:
                self.step([], False, 1)
            if self.flight:
                self.process()
            self.every_page_is_accounted_for()
        assert not self.scheduler.has_work, "work is left that does not end"
        assert all(each.status is Status.FINISHED for each in self.sequences)
        states = self.manager.states
        assert states is None or states.num_blank + states.num_known == states.num_kept
        assert [pool.used for pool in self.manager.pools] == [0] * len(self.manager.pools)
        assert sorted(self.scheduler._rows) == list(range(self.scheduler.config.max_num_seqs))


Engine.TestCase.settings = settings(max_examples=100, stateful_step_count=50)
TestEngine = Engine.TestCase


@pytest.mark.exhaustive
class TestEngineAtLength(Engine.TestCase):
    settings = settings(max_examples=600, stateful_step_count=80)
