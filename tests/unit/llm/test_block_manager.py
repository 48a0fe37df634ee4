"""Prefix reuse, copy-on-write, sliding windows and eviction, case by case."""

import pytest

from fornax.llm.block_manager import BlockManager, PagePool
from fornax.llm.scheduler_output import Entry, PageCopy, SchedulerOutput, StateCopy
from fornax.llm.sequence import Sequence
from fornax.llm.state_pool import StatePool


def run(manager, tokens, *, salt=b"", row=0, **options):
    """Admit a sequence and compute all of its tokens."""
    sequence = Sequence(0, "r", list(tokens), max_len=1000, salt=salt, **options)
    sequence.row = row
    plan = SchedulerOutput()
    match = manager.match(sequence)
    assert manager.claim(sequence, match, manager.spare(0))
    manager.admit(sequence, match, plan)
    assert manager.extend(sequence, sequence.num_computed, len(tokens), plan)
    sequence.num_computed = len(tokens)
    manager.commit(sequence)
    return sequence, match.num_tokens


@pytest.mark.parametrize(("length", "hit"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8)])
def test_whole_pages_are_reused_but_never_the_last_token(length, hit):
    manager = BlockManager([PagePool(20)], 4)
    first, _ = run(manager, range(length))
    second, found = run(manager, range(length), row=1)
    assert found == hit
    assert first.pages[0][: hit // 4] == second.pages[0][: hit // 4]
    assert not set(first.pages[0][hit // 4 :]) & set(second.pages[0][hit // 4 :])


def test_prefix_is_found_after_its_sequence_is_gone():
    manager = BlockManager([PagePool(20)], 4)
    sequence, _ = run(manager, range(10))
    manager.free(sequence)
    assert manager.usage == 0
    assert run(manager, range(10))[1] == 8


def test_same_tokens_after_another_page_or_salt_are_not_a_hit():
    manager = BlockManager([PagePool(40)], 4)
    run(manager, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert run(manager, [0, 2, 3, 4, 5, 6, 7, 8, 9])[1] == 0
    assert run(manager, [1, 2, 3, 4, 5, 6, 7, 8, 9], salt=b"adapter")[1] == 0
    assert run(manager, [1, 2, 3, 4, 0, 6, 7, 8, 9])[1] == 4


def test_reuse_can_be_turned_off_and_reset():
    manager = BlockManager([PagePool(40)], 4)
    run(manager, range(9))
    assert run(manager, range(9), reads_cache=False)[1] == 0
    manager.reset_prefix_cache()
    assert run(manager, range(9))[1] == 0
    off = BlockManager([PagePool(40)], 4, prefix_caching=False)
    run(off, range(9))
    assert run(off, range(9))[1] == 0


def test_unknown_tokens_are_not_registered():
    manager = BlockManager([PagePool(20)], 4)
    sequence, _ = run(manager, range(7))
    sequence.num_pending = 1
    sequence.num_computed = 8
    manager.commit(sequence)
    assert sequence.num_registered == 1
    sequence.num_pending = 0
    sequence.tokens.append(7)
    manager.commit(sequence)
    assert sequence.num_registered == 2


def test_least_recently_freed_goes_first_and_ends_before_beginnings():
    manager = BlockManager([PagePool(6)], 4)  # five pages
    old, _ = run(manager, range(8))
    new, _ = run(manager, range(100, 108))
    manager.free(old)
    manager.free(new)
    run(manager, range(200, 208))  # one blank page and the end of the old prefix
    assert manager.match(Sequence(1, "r", list(range(9)), max_len=20)).num_tokens == 4
    assert manager.match(Sequence(1, "r", list(range(100, 109)), max_len=200)).num_tokens == 8


def test_fork_copies_the_partial_page_for_all_but_the_last_writer():
    manager = BlockManager([PagePool(20)], 4)
    parent, _ = run(manager, range(6))
    child = Sequence(1, "r", list(range(6)), max_len=20)
    child.row = 1
    manager.fork(parent, child, SchedulerOutput())
    shared = child.pages[0][1]
    plan = SchedulerOutput()
    assert manager.extend(parent, 6, 7, plan)
    assert plan.copies == [PageCopy(0, shared, parent.pages[0][1])]
    assert parent.pages[0][0] == child.pages[0][0]
    plan = SchedulerOutput()
    assert manager.extend(child, 6, 7, plan)
    assert (plan.copies, child.pages[0][1]) == ([], shared)


def test_extension_that_does_not_fit_takes_nothing():
    manager = BlockManager([PagePool(20), PagePool(3)], 4)
    sequence, _ = run(manager, range(4))
    assert not manager.extend(sequence, 4, 13, SchedulerOutput())
    assert [len(pages) for pages in sequence.pages] == [1, 1]
    assert manager.extend(sequence, 4, 8, SchedulerOutput())


def test_sliding_group_keeps_the_window_only():
    manager = BlockManager([PagePool(20, window=5), PagePool(20)], 4)
    sequence, _ = run(manager, range(12))
    assert manager.extend(sequence, 12, 13, SchedulerOutput())  # sees 8 to 12
    sliding, full = sequence.pages
    assert sliding[:2] == [0, 0]
    assert all(sliding[2:])
    assert all(full)
    assert manager.pools[0].used == 2


def test_sliding_hit_needs_only_the_last_window():
    manager = BlockManager([PagePool(20, window=5)], 4)
    sequence, _ = run(manager, range(16))
    manager.free(sequence)
    pool = manager.pools[0]
    beginning = pool.by_digest[sequence.page_digests[0]]
    del pool.by_digest[sequence.page_digests[0]]
    pool.digests[beginning] = None
    again = Sequence(1, "r", list(range(17)), max_len=20)
    assert manager.match(again).num_tokens == 16
    assert manager.match(again).pages[0][:3] == [0, 0, 0]
    last = pool.by_digest.pop(sequence.page_digests[3])
    pool.digests[last] = None
    assert manager.match(again).num_tokens == 12  # needs page 2 alone


def test_shortage_names_the_pages():
    manager = BlockManager([PagePool(5), PagePool(3, window=4)], 4)
    assert manager.shortage(16) is None
    assert manager.shortage(17) == "5 pages of 4 tokens, the cache has 4"
    narrow = BlockManager([PagePool(2, window=6)], 4)
    assert narrow.shortage(4) is None
    assert narrow.shortage(100) == "3 pages of 4 tokens, the cache has 1"


def test_pool_never_gives_page_zero_and_prefers_blank_pages():
    pool = PagePool(4)
    pages = [pool.take() for _ in range(3)]
    assert sorted(pages) == [1, 2, 3]
    pool.register(pages[0], b"known")
    pool.release(pages[0])
    pool.release(pages[1])
    assert pool.take() == pages[1]
    assert pool.by_digest == {b"known": pages[0]}
    assert pool.take() == pages[0]
    assert pool.by_digest == {}


def run_in_chunks(manager, tokens, most=8, row=0):
    """Admit a sequence and compute all of its tokens, at most `most` at a time; returns it, the
    ends of its chunks after what was found, and all that was planned."""
    sequence, plan, ends = Sequence(0, "r", list(tokens), max_len=1000), SchedulerOutput(), []
    sequence.row = row
    match = manager.match(sequence)
    assert manager.claim(sequence, match, manager.spare(0))
    manager.admit(sequence, match, plan)
    ends.append(match.num_tokens)
    while sequence.remaining:
        start = sequence.num_computed
        count = manager.chunk(sequence, min(most, sequence.remaining))
        assert manager.extend(sequence, start, start + count, plan)
        sequence.num_computed += count
        manager.commit(sequence)
        manager.keep_state(sequence, Entry(sequence, row, start, count), plan)
        ends.append(start + count)
    return sequence, ends, plan


def test_a_prefix_is_reused_where_a_state_is_kept():
    """Where chunks end, at the last whole page, and where a prompt left what others had."""
    manager = BlockManager([PagePool(40)], 4, states=StatePool(2, 1, 10))
    first, ends, plan = run_in_chunks(manager, range(27))
    assert ends == [0, 8, 16, 24, 27]
    assert plan.kept == [StateCopy(0, slot) for slot in (2, 3, 4)]
    manager.free(first)
    other, ends, plan = run_in_chunks(manager, [*range(14), *range(50, 60)], row=1)
    assert ends == [8, 12, 20, 24]
    assert plan.restored == [StateCopy(2, 1)]
    manager.free(other)
    _, ends, _ = run_in_chunks(manager, [*range(14), *range(70, 80)])
    assert ends[0] == 12


def test_a_state_goes_with_its_page_and_the_longest_unused_first():
    manager = BlockManager([PagePool(9)], 4, states=StatePool(2, 1, 3))  # eight pages
    first, *_ = run_in_chunks(manager, range(13))
    manager.free(first)
    assert manager.match(Sequence(1, "r", list(range(13)), 20)).num_tokens == 12
    second, *_ = run_in_chunks(manager, range(50, 71))  # six pages, and three states
    match = manager.match(Sequence(1, "r", list(range(13)), 20))
    assert (match.num_tokens, match.num_shared) == (0, 8)
    manager.free(second)
    assert manager.states.num_blank + manager.states.num_known == 3


def test_a_decoding_sequence_keeps_its_last_state_in_one_slot():
    manager = BlockManager([PagePool(40)], 4, states=StatePool(2, 3, 4))
    sequence, *_ = run_in_chunks(manager, range(9))
    plan = SchedulerOutput()
    for length in range(10, 18):
        sequence.tokens.append(length)
        assert manager.extend(sequence, length - 1, length, plan)
        sequence.num_computed = length
        manager.commit(sequence)
        manager.keep_state(sequence, Entry(sequence, 0, length - 1, 1), plan)
    assert [copy.target for copy in plan.kept] == [7, 7]
    manager.free(sequence)
    assert manager.match(Sequence(1, "r", sequence.tokens, 99)).num_tokens == 16


def test_proposed_tokens_keep_a_state_only_where_they_are_accepted():
    manager = BlockManager([PagePool(40)], 4, states=StatePool(2, 4, 2))
    sequence, *_ = run_in_chunks(manager, range(3))
    for accepted, found in ((1, 0), (4, 4)):
        start, plan = sequence.num_computed, SchedulerOutput()
        sequence.tokens.append(start)
        assert manager.extend(sequence, start, start + 4, plan)
        sequence.num_computed = start + 4
        manager.commit(sequence)
        manager.keep_state(sequence, Entry(sequence, 0, start, 4, drafts=3), plan)
        sequence.num_computed = start + accepted
        sequence.tokens += range(start + 1, start + accepted)
        manager.commit(sequence)
        assert manager.match(Sequence(1, "r", [*sequence.tokens, 0], 99)).num_tokens >= found
