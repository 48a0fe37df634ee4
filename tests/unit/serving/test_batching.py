"""What the queues and the order of turns promise, with a clock that the test moves."""

import tracemalloc
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fornax.config import ServingError
from fornax.config.errors import ServingCode
from fornax.serving.batching import Limit, Queue, RowPlan, Share, Shares, Waiting

BUCKETS = (1, 4, 16)
LINEAR = {1: 1.0, 4: 2.0, 16: 5.0}


def plan(most: int = 16, seconds=LINEAR) -> RowPlan:
    return RowPlan(BUCKETS, most, seconds)


def queue(**options) -> Queue:
    options.setdefault("limit", 1000)
    return Queue({(): plan()}, **options)


class Owner:
    def __init__(self):
        self.gone = False


def waiting(rows: int = 1, **fields) -> Waiting:
    return Waiting(Owner(), None, rows, **fields)


def test_rows_are_cut_where_two_runs_cost_less_than_padding():
    cheap = {1: 1.0, 8: 3.0, 32: 10.0}
    cut = RowPlan((1, 8, 32), 32, cheap)
    assert cut.rows(9) == 8  # 3 + 1 < 10
    assert cut.rows(31) == 31  # three of 8 and seven of 1 cost more
    slowed = {1: 5.0, 8: 50.0, 32: 10.0}  # by something else: 8 rows cost no more than 32
    assert RowPlan((1, 8, 32), 32, slowed).rows(8) == 8
    flat = RowPlan((1, 8, 32), 32, dict.fromkeys(cheap, 1.0))
    assert [flat.rows(n) for n in (9, 32, 500)] == [9, 32, 32]


def followed(cut: RowPlan, rows: int, seconds) -> float:
    """What so many rows cost, batch after batch."""
    cost, left = 0.0, rows
    while left:
        take = cut.rows(left)
        assert 1 <= take <= min(left, cut.most)
        cost += seconds[cut.bucket(take)]
        left -= take
    return cost


def rising(seconds):
    return {b: min(value for each, value in seconds.items() if each >= b) for b in seconds}


@given(
    st.dictionaries(st.sampled_from([1, 2, 4, 8, 16]), st.floats(0.1, 10), min_size=1),
    st.integers(1, 16),
)
def test_a_plan_never_costs_more_than_one_bucket_for_all(seconds, most):
    cut = RowPlan(sorted(seconds), most, seconds)
    seconds = rising(seconds)
    for rows in range(1, cut.most + 1):
        assert followed(cut, rows, seconds) <= seconds[cut.bucket(rows)] + 1e-9


@given(
    st.dictionaries(
        st.sampled_from([1, 7, 64, 500, 1500, 5000, 20_000]), st.floats(0.1, 10), min_size=1
    ),
    st.integers(1025, 20_000),
    st.integers(1, 20_000),
)
def test_a_plan_of_many_rows_costs_no_more_than_a_bucket_or_one_bucket_again_and_again(
    seconds, most, rows
):
    cut = RowPlan(sorted(seconds), most, seconds)
    seconds = rising(seconds)
    rows = min(rows, cut.most)
    cost = followed(cut, rows, seconds)
    again = [-(-rows // b) * seconds[b] for b in seconds if 1024 < b < rows]
    assert cost <= min([seconds[cut.bucket(rows)], *again]) + 1e-9


def test_a_plan_of_a_million_rows_holds_an_entry_a_bucket():
    buckets = [10**power for power in range(7)]
    tracemalloc.start()
    cut = RowPlan(buckets, buckets[-1], {rows: 1e-4 + 1e-6 * rows for rows in buckets})
    assert cut.rows(10**6) == 10**6
    assert cut.rows(100_007) == 100_000
    assert cut.rows(11_000) == 10_000
    assert tracemalloc.get_traced_memory()[1] < 100_000  # one entry per row took 8 MB
    tracemalloc.stop()


def test_a_batch_goes_at_once_without_a_delay_and_else_when_it_is_full_or_due():
    at_once = queue()
    at_once.put(waiting(arrived=5.0))
    assert at_once.ready_at(5.0) == 5.0
    patient = queue(delay=2.0)
    patient.put(waiting(arrived=5.0))
    assert patient.ready_at(5.5) == 7.0
    patient.put(*(waiting(arrived=5.5) for _ in range(15)))
    assert patient.ready_at(5.5) == 5.5
    assert patient.full()


def test_a_request_due_sooner_than_the_delay_does_not_wait_for_it_to_expire():
    patient = queue(delay=2.0)
    patient.put(waiting(arrived=5.0, deadline=6.0))
    assert patient.ready_at(5.0) == 5.5


def test_a_preferred_size_goes_before_the_delay_is_over():
    eager = queue(delay=2.0, preferred=(4,))
    eager.put(*(waiting(arrived=5.0) for _ in range(6)))
    assert eager.ready_at(5.0) == 5.0
    assert eager.take(5.0).rows == 4
    assert eager.ready_at(5.0) == 7.0
    assert eager.take(7.0).rows == 2


def test_padding_rows_go_to_smaller_shapes_and_never_to_larger_ones():
    plans = {(8,): plan(), (64,): plan()}
    mixed = Queue(plans, limit=100, fits=lambda small, large: small[0] <= large[0])
    mixed.put(*(waiting(key=(64,)) for _ in range(3)), waiting(key=(8,)), waiting(key=(8,)))
    batch = mixed.take(0.0)
    assert (batch.bucket, batch.rows, batch.key) == (4, 4, (64,))
    assert [each.key for each in batch.requests] == [(64,)] * 3 + [(8,)]
    mixed.put(waiting(key=(64,)))
    assert [each.key for each in mixed.take(0.0).requests] == [(8,)]


def test_the_queue_refuses_what_exceeds_its_limit_unless_someone_has_left():
    left = []
    short = Queue({(): plan()}, limit=2, abandoned=lambda owner: owner.gone, gone=left.append)
    first, second = waiting(), waiting()
    short.put(first, second)
    with pytest.raises(ServingError, match="queue_limit=2") as refused:
        short.put(waiting())
    assert refused.value.code is ServingCode.RESOURCE_EXHAUSTED
    first.owner.gone = True
    short.put(waiting())
    assert left == [first]
    assert first not in short.take(0.0).requests


def test_without_a_batch_dimension_each_request_runs_alone():
    single = Queue({(): RowPlan((1,), 1, {1: 1.0})}, limit=9, together=False)
    single.put(waiting(), waiting())
    assert len(single.take(0.0).requests) == 1
    assert single.full()


def test_those_that_left_leave_no_trace_however_long_others_wait():
    starved = queue(limit=10)
    starved.put(waiting(priority=1, deadline=1e9))
    for moment in range(1000):
        starved.put(*(waiting(priority=3, deadline=moment + 0.5) for _ in range(5)))
        assert len(starved.expire(moment + 1)) == 5
    assert len(starved._deadlines) < 100
    assert sum(len(shape) for level in starved._levels.values() for shape in level.values()) < 100


def test_a_full_queue_is_not_searched_at_every_refusal():
    asked = Counter()
    full = queue(limit=800, abandoned=lambda owner: asked.update(["times"]) or False)
    full.put(*(waiting() for _ in range(800)))
    for _ in range(1000):
        with pytest.raises(ServingError):
            full.put(waiting())
    assert asked["times"] <= 10 * 800


REQUEST = st.fixed_dictionaries(
    {
        "rows": st.integers(1, 16),
        "key": st.sampled_from([(8,), (16,)]),
        "priority": st.integers(1, 3),
        "lifetime": st.one_of(st.none(), st.floats(0.01, 5)),
        "leaves": st.booleans(),
    }
)
STEP = st.one_of(REQUEST, st.floats(0.01, 3), st.just("take"))


@settings(max_examples=200)
@given(
    st.lists(STEP, max_size=60), st.integers(1, 20), st.sampled_from([0.0, 1.0]), st.integers(1, 16)
)
def test_every_accepted_request_leaves_once_in_order_and_in_time(steps, limit, delay, most):
    """Whatever comes: batches fit, nobody late or gone is computed, nobody is lost or doubled."""
    plans = {key: plan(most) for key in [(8,), (16,)]}
    found = Counter()
    tested = Queue(
        plans, limit=limit, delay=delay, fits=lambda small, large: small <= large,
        abandoned=lambda owner: owner.gone, gone=lambda each: found.update([id(each)]),
    )  # fmt: skip
    now, accepted = 0.0, []

    def take():
        for each in tested.expire(now):
            assert each.deadline <= now
            found.update([id(each)])
        alive = [e for e in accepted if not e.taken and not e.owner.gone]
        batch = tested.take(now)
        assert (batch is None) == (not alive)
        if batch is None:
            return
        found.update(map(id, batch.requests))
        assert batch.rows == sum(each.rows for each in batch.requests) <= batch.bucket
        assert batch.rows <= max(most, batch.requests[0].rows)
        assert all(each.key <= batch.key for each in batch.requests)
        assert all(each.deadline is None or each.deadline > now for each in batch.requests)
        assert not any(each.owner.gone for each in batch.requests)
        best = min(alive, key=lambda each: (each.priority, each.number))
        assert batch.requests[0] is best or best in batch.requests
        same = [e.number for e in batch.requests if e.key == batch.key and e.priority == 1]
        assert same == sorted(same)

    for step in steps:
        if step == "take":
            take()
        elif isinstance(step, float):
            now += step
        else:
            rows = min(step["rows"], most)
            each = waiting(rows, key=step["key"], priority=step["priority"], arrived=now)
            if step["lifetime"] is not None:
                each.deadline = now + step["lifetime"]
            try:
                tested.put(each)
            except ServingError:
                assert tested.size == limit
                continue
            each.owner.gone = step["leaves"]
            accepted.append(each)
        assert tested.size <= limit
    while tested.head() is not None:
        now = max(now, tested.ready_at(now))
        take()
    assert tested.size == 0
    assert found == Counter(id(each) for each in accepted)


@settings(max_examples=60)
@given(
    st.lists(st.floats(0.001, 0.05), min_size=2, max_size=5),
    st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=5, max_size=5),
)
def test_busy_functions_get_time_by_weight_however_long_their_batches(lengths, weights):
    shares: Shares[Share] = Shares()
    every = []
    for weight in weights[: len(lengths)]:
        share = Share(queue(limit=10**6), Limit(1), weight)
        shares.add(share)
        every.append(share)
    got = dict.fromkeys(every, 0.0)
    spent = 0.0
    while spent < 20 * max(lengths) * len(lengths):
        for share in every:
            share.queue.put(waiting())
        share = shares.pick(0.0)
        length = lengths[every.index(share)]
        share.queue.take(0.0)
        shares.charge(share, length)
        got[share] += length
        spent += length
    fair = [got[share] / share.weight for share in every]
    longest = max(x / share.weight for x, share in zip(lengths, every, strict=True))
    assert max(fair) - min(fair) <= 2 * longest


@pytest.mark.slow
@settings(max_examples=60)
@given(st.randoms(), st.lists(st.floats(0.001, 0.05), min_size=2, max_size=5))
def test_nobody_waits_longer_than_two_turns_of_everyone(random, lengths):
    """Functions that are busy now and then, on one device, by a clock that batches move on."""
    shares: Shares[Share] = Shares()
    every = [Share(queue(), Limit(1)) for _ in lengths]
    for share in every:
        shares.add(share)
    now = 0.0
    for _ in range(300):
        for share in every:
            if not share.queue.size and random.random() < 0.5:
                share.queue.put(waiting(arrived=now))
        share = shares.pick(now)
        if share is None:
            now += 0.001
            continue
        batch = share.queue.take(now)
        assert now - batch.requests[0].arrived <= 2 * len(every) * max(lengths)
        length = lengths[every.index(share)]
        shares.charge(share, length)
        now += length


def test_one_that_was_idle_neither_saves_up_turns_nor_waits():
    shares: Shares[Share] = Shares()
    busy, idle = Share(queue(), Limit(1)), Share(queue(), Limit(1))
    shares.add(busy)
    shares.add(idle)
    for _ in range(100):
        busy.queue.put(waiting())
        assert shares.pick(0.0) is busy
        busy.queue.take(0.0)
        shares.charge(busy, 1.0)
    turns = []
    for _ in range(10):
        busy.queue.put(waiting())
        idle.queue.put(waiting())
        share = shares.pick(0.0)
        share.queue.take(0.0)
        shares.charge(share, 1.0)
        turns.append(share is idle)
    assert turns[:2].count(True) == 1
    assert 4 <= turns.count(True) <= 6


def test_a_model_at_its_concurrency_limit_lets_others_go():
    shares: Shares[Share] = Shares()
    limit = Limit(1)
    first, second = Share(queue(), limit), Share(queue(), Limit(1))
    shares.add(first)
    shares.add(second)
    first.queue.put(waiting())
    limit.running = 1
    assert shares.pick(0.0) is None
    second.queue.put(waiting())
    assert shares.pick(0.0) is second
