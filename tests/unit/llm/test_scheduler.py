"""What the scheduler promises, case by case; test_scheduler_properties mixes everything."""

import itertools

import pytest

from fornax.config.errors import EngineError
from fornax.llm.block_manager import BlockManager, PagePool
from fornax.llm.scheduler import Scheduler, SchedulerConfig
from fornax.llm.sequence import Sequence, Status

numbers = itertools.count()


def scheduler(pages=100, page_size=4, **options):
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 32} | options
    manager = BlockManager([PagePool(pages)], page_size)
    return Scheduler(SchedulerConfig(**options), manager)


def sequence(length=4, max_len=40, **options):
    number = next(numbers)
    options.setdefault("arrival", float(number))
    prompt = [1000 * number + index for index in range(length)]
    return Sequence(number, str(number), prompt, max_len, **options)


def ranges(plan):
    return [(each.sequence, each.start, each.count) for each in plan.entries]


def process(engine, plan, token=7):
    for sample in plan.samples:
        engine.received(sample.sequence, [token])
        if len(sample.sequence.tokens) == sample.sequence.max_len:
            engine.finish(sample.sequence)


def test_steps_overlap_with_one_token_pending():
    engine = scheduler()
    one = sequence(length=5)
    engine.add(one)
    first = engine.schedule()
    second = engine.schedule()
    assert ranges(first) == [(one, 0, 5)]
    assert ranges(second) == [(one, 5, 1)]
    assert [each.position for each in (*first.samples, *second.samples)] == [5, 6]
    assert (one.num_pending, one.length, one.remaining) == (2, 7, 1)
    process(engine, first)
    assert (one.tokens[5:], one.num_pending) == ([7], 1)


def test_no_step_goes_beyond_the_limit():
    engine = scheduler()
    one = sequence(length=4, max_len=6)
    engine.add(one)
    plans = [engine.schedule(), engine.schedule()]
    assert engine.schedule() is None
    for plan in plans:
        process(engine, plan)
    assert one.status is Status.FINISHED
    assert len(one.tokens) == 6
    assert not engine.has_work
    assert engine.manager.usage == 0


def test_a_call_decodes_several_steps_until_a_sequence_ends():
    engine = scheduler()
    long, short = sequence(length=5), sequence(length=4, max_len=8)
    engine.add(long)
    engine.add(short)
    first = engine.schedule(6)
    assert first.steps == 1, "prompts were read"
    second = engine.schedule(6)
    assert second.steps == 3, "the short one has three tokens left"
    assert ranges(second) == [(long, 5, 1), (short, 4, 1)]
    assert [(each.position, each.row) for each in second.samples] == [(6, 0), (5, 1)]
    assert (long.num_pending, long.num_computed, short.length) == (4, 8, 8)
    third = engine.schedule(6)
    assert (ranges(third), third.steps) == ([(long, 8, 1)], 1), "the short one is not over yet"
    process(engine, first)
    for each in (long, short):
        engine.received(each, [7, 7, 7], 3)
    engine.finish(short)
    assert (long.tokens[5:], short.output) == ([7] * 4, [7] * 4)
    engine.add(sequence())
    assert engine.schedule(6).steps == 1, "one waited"
    assert engine.schedule(6).steps == 6


def test_a_call_decodes_only_steps_that_there_are_pages_for():
    engine = scheduler(pages=6)
    one, two = sequence(length=4, max_len=20), sequence(length=4, max_len=20)
    engine.add(one)
    engine.add(two)
    process(engine, engine.schedule())
    plan = engine.schedule(9)  # one page each, and the fifth for neither
    assert plan.steps == 4
    assert engine.manager.pools[0].available == 1
    for each in (one, two):
        engine.received(each, [7, 7], 4)
        assert each.remaining == 1, "what was sampled after an end is forgotten"
        assert len(each.tokens) == 7


def test_decodes_go_first_and_prompts_are_cut_to_the_budget():
    engine = scheduler(max_num_batched_tokens=8)
    short, long = sequence(length=3), sequence(length=20)
    engine.add(short)
    engine.schedule()
    engine.add(long)
    assert ranges(engine.schedule()) == [(short, 3, 1), (long, 0, 7)]
    plan = engine.schedule()
    assert ranges(plan) == [(short, 4, 1), (long, 7, 7)]
    assert [each.sequence for each in plan.samples] == [short]


def test_drafts_are_checked_and_the_rejected_rolled_back():
    engine = scheduler()
    one = sequence(length=4)
    engine.add(one)
    process(engine, engine.schedule())
    one.drafts = [8, 9, 10]
    plan = engine.schedule()
    assert (plan.entries[0].start, plan.entries[0].count, plan.entries[0].drafts) == (4, 4, 3)
    assert [(each.offset, each.position) for each in plan.samples] == [
        (0, 5),
        (1, 6),
        (2, 7),
        (3, 8),
    ]
    assert engine.schedule() is None  # what follows depends on the drafts
    engine.received(one, [8, 6], sampled=4)
    assert (one.output, one.num_computed, one.remaining) == ([7, 8, 6], 6, 1)
    assert one.drafts == []


def test_drafts_leave_room_for_prompts_and_the_token_limit():
    engine = scheduler(max_num_batched_tokens=9)
    one, two = sequence(length=4), sequence(length=30)
    engine.add(one)
    process(engine, engine.schedule())
    engine.add(two)
    one.drafts = [1] * 8
    assert ranges(engine.schedule()) == [(one, 4, 5), (two, 0, 4)]
    near = sequence(length=4, max_len=7)
    other = scheduler()
    other.add(near)
    process(other, other.schedule())
    near.drafts = [1] * 8
    assert ranges(other.schedule()) == [(near, 4, 2)]


def test_completions_fork_from_the_last_prompt_token():
    engine = scheduler(max_num_batched_tokens=4)
    children = [sequence(length=0), sequence(length=0)]
    parent = sequence(length=6)
    for child in children:
        child.prompt[:] = parent.prompt
        child.tokens[:] = parent.prompt
        child.num_prompt = 6
    parent.children = list(children)
    engine.add(parent)
    assert engine.schedule().samples == []
    plan = engine.schedule()
    assert [each.sequence for each in plan.samples] == [parent, *children]
    assert {(each.entry, each.offset, each.position) for each in plan.samples} == {(0, 1, 6)}
    assert engine.manager.pools[0].used == 2
    plan = engine.schedule()
    assert len(plan.copies) == 2
    assert engine.manager.pools[0].used == 4


def test_completions_without_a_row_queue_on_their_own():
    engine = scheduler(max_num_seqs=2)
    parent = sequence(length=6)
    parent.children = [Sequence(next(numbers), "r", parent.prompt, 40) for _ in range(3)]
    children = list(parent.children)
    engine.add(parent)
    plan = engine.schedule()
    assert [each.sequence for each in plan.samples] == [parent, children[0]]
    assert engine.waiting == children[1:]
    engine.finish(parent)
    assert (children[1], 4, 2) in ranges(engine.schedule())


def test_children_outlive_a_parent_that_is_aborted_early():
    engine = scheduler()
    parent = sequence(length=6)
    parent.children = [Sequence(next(numbers), "r", parent.prompt, 40) for _ in range(2)]
    gone, left = parent.children
    engine.add(parent)
    engine.finish(gone)
    engine.finish(parent)
    assert [each.sequence for each in engine.schedule().entries] == [left]


def test_last_in_order_is_preempted_and_comes_back_whole():
    engine = scheduler(pages=7, max_num_seqs=2)
    old, new = sequence(length=8, max_len=24), sequence(length=8, max_len=24)
    engine.add(old)
    engine.add(new)
    lost = []
    while engine.has_work:
        plan = engine.schedule()
        assert plan is not None
        lost += plan.preempted
        process(engine, plan)
    assert lost == [new]
    assert len(old.tokens) == len(new.tokens) == 24


def test_preempted_sequence_waits_for_its_pending_tokens():
    engine = scheduler()
    one = sequence()
    engine.add(one)
    plan = engine.schedule()
    engine.reset()
    assert engine.schedule() is None
    process(engine, plan)
    plan = engine.schedule()
    assert plan.preempted == [one]
    assert ranges(plan) == [(one, 0, 5)]


def test_abort_frees_pages_and_drops_pending_tokens():
    engine = scheduler()
    one = sequence()
    engine.add(one)
    engine.schedule()
    engine.finish(one)
    engine.finish(one)
    assert engine.manager.usage == 0
    engine.received(one, [3])
    assert one.output == []
    assert engine.schedule() is None


def test_failed_sample_stands_still_until_finished():
    engine = scheduler()
    one = sequence()
    engine.add(one)
    engine.schedule()
    engine.received(one, [])
    assert engine.schedule() is None
    engine.finish(one)
    assert not engine.has_work


def test_pooling_sequence_is_computed_once():
    engine = scheduler(max_num_batched_tokens=6)
    one = sequence(length=7, max_len=7, pooling=True)
    engine.add(one)
    assert engine.schedule().pooled == []
    plan = engine.schedule()
    assert (plan.samples, plan.pooled[0].sequence, plan.pooled[0].offset) == ([], one, 0)
    assert engine.schedule() is None
    engine.finish(one)
    assert not engine.has_work


def test_prefix_is_shared_with_a_sequence_of_the_same_step():
    engine = scheduler()
    one = sequence(length=9)
    two = Sequence(next(numbers), "r", one.prompt, 40, arrival=one.arrival)
    engine.add(one)
    engine.add(two)
    plan = engine.schedule()
    assert ranges(plan) == [(one, 0, 9), (two, 8, 1)]
    assert (plan.prefix_queries, plan.prefix_hits, two.num_cached) == (18, 8, 8)


def test_priority_goes_first_but_ages():
    engine = scheduler(max_num_seqs=1, policy="priority", priority_aging_seconds=10.0)
    low = sequence(priority=1, arrival=100.0)
    soon = sequence(priority=0, arrival=105.0)
    late = sequence(priority=0, arrival=111.0)
    for each in (late, low, soon):
        engine.add(each)
    assert engine.waiting == [soon, low, late]


def test_low_priority_ends_under_a_stream_of_high():
    engine = scheduler(max_num_seqs=2, policy="priority", priority_aging_seconds=10.0)
    low = sequence(priority=5, arrival=0.0, max_len=10)
    engine.add(low)
    for second in range(200):
        engine.add(sequence(priority=0, arrival=float(second), max_len=10))
        process(engine, engine.schedule())
        if low.status is Status.FINISHED:
            break
    assert low.status is Status.FINISHED


def test_adapters_beyond_the_limit_wait_and_block_nobody():
    engine = scheduler(max_loras=1)
    first, other, plain = sequence(lora="a"), sequence(lora="b"), sequence()
    for each in (first, other, plain):
        engine.add(each)
    assert [each.sequence for each in engine.schedule().entries] == [first, plain]
    assert (engine.running_loras, engine.waiting_loras) == (("a",), ("b",))


def test_waiting_adapter_gets_a_place_under_a_stream_of_others():
    engine = scheduler(max_loras=1, max_num_seqs=3)
    rare = sequence(lora="b", max_len=10)
    for second in range(100):
        engine.add(sequence(lora="a", max_len=10))
        if second == 5:
            rare.arrival = engine.waiting[-1].arrival
            engine.add(rare)
        process(engine, engine.schedule())
    assert rare.status is Status.FINISHED


def test_a_sequence_that_can_never_run_is_refused():
    engine = scheduler()
    with pytest.raises(EngineError, match="101 pages of 4 tokens, the cache has 99"):
        engine.add(sequence(max_len=402))
    assert not engine.has_work


BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)


def paced(target, seconds_of, steps, hiccup=None):
    """Run steps of three sequences that decode beside one that reads a long prompt; return what
    each of them took by `seconds_of(tokens)`, and the prompt's tokens."""
    engine = scheduler(
        pages=40_000,
        max_num_batched_tokens=512,
        buckets=BUCKETS,
        inter_token_latency_target=target,
    )
    for _ in range(3):
        engine.add(sequence(length=4, max_len=5_000))
    process(engine, engine.schedule())
    engine.add(sequence(length=100_000, max_len=100_001))
    times, chunks = [], []
    for number in range(steps):
        plan = engine.schedule()
        bucket = next(size for size in BUCKETS if size >= plan.num_tokens)
        seconds = seconds_of(bucket) * (20 if number == hiccup else 1)
        times.append(seconds)
        chunks.append(plan.prompt_tokens)
        assert plan.num_tokens - plan.prompt_tokens == 3
        engine.took(plan, bucket, seconds)
        process(engine, plan)
    return times, chunks


def test_prompts_take_no_more_of_a_step_than_the_target_leaves():
    times, chunks = paced(0.02, lambda tokens: 0.004 + 0.0001 * tokens, steps=30)
    assert times[0] > 0.05  # nothing was measured yet
    assert max(times[4:]) <= 0.02
    assert chunks[-1] == 128 - 3  # the largest bucket within the target


def test_a_target_that_decoding_alone_exceeds_leaves_room_for_prompts():
    _, chunks = paced(0.02, lambda tokens: 0.1 + 0.001 * tokens, steps=10)
    assert chunks[-1] == 32


def test_a_step_that_was_held_up_is_forgotten():
    _, chunks = paced(0.02, lambda tokens: 0.004 + 0.0001 * tokens, steps=30, hiccup=12)
    assert chunks[13] < 64
    assert chunks[20:] == [125] * 10
