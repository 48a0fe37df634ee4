"""Which replica gets a request."""

import asyncio

import pytest

from fornax.cluster.routing.pool import Replica, ReplicaPool, RoutingConfig
from fornax.cluster.routing.prefixes import block_keys
from fornax.config.errors import ConfigError

LONG = block_keys(bytes(range(256)) * 2)
OTHER = block_keys(bytes(range(1, 256)) * 2)


def pool_of(count=3, **options):
    pool = ReplicaPool(RoutingConfig(**options))
    for number in range(count):
        pool.add(Replica(number=number, url="http://127.0.0.1:1", phase="ready"))
    return pool


def chosen(pool, keys=(), tried=()):
    choice = pool.choose(keys, tried)
    return None if choice is None else choice.replica.number


def test_equal_prompts_go_where_they_were_and_others_elsewhere():
    pool = pool_of()
    first = chosen(pool, LONG)
    assert [chosen(pool, LONG) for _ in range(5)] == [first] * 5
    other = chosen(pool, OTHER)
    assert other != first
    assert chosen(pool, OTHER) == other
    assert pool.choose(LONG).matched == len(LONG)


def test_a_short_common_beginning_binds_nobody():
    pool = pool_of()
    tail = [block_keys(bytes([n]) * 1024) for n in range(3)]
    assert {chosen(pool, LONG[:2] + each) for each in tail} == {0, 1, 2}


def test_an_overloaded_replica_gives_its_prefix_to_the_next_best():
    pool = pool_of(balance_threshold=4)
    first = pool.choose(LONG).replica
    first.running = 3
    assert pool.choose(LONG).replica is first
    first.running = 4
    second = pool.choose(LONG)
    assert second.replica is not first
    assert second.matched == 0
    first.running = 0
    second.replica.running = 1
    assert pool.choose(LONG).replica is first  # both have it now, and it is less busy
    for each in pool.ready():
        each.running = 100
    first.running = 104  # four more, and yet not half as many again
    assert pool.choose(LONG[:-1]).replica in (first, second.replica)


def test_least_requests_and_round_robin():
    pool = pool_of(policy="least-requests")
    for number, running in enumerate((2, 1, 3)):
        pool.replicas[number].running = running
    assert chosen(pool, LONG) == 1
    assert chosen(pool, LONG) == 1
    pool = pool_of(policy="round-robin")
    pool.replicas[0].running = 9
    assert [chosen(pool, LONG) for _ in range(6)] == [0, 1, 2, 0, 1, 2]


def test_only_ready_replicas_that_were_not_tried_are_chosen():
    pool = pool_of()
    pool.suspect(pool.replicas[0])
    pool.enter(pool.replicas[1], "draining")
    assert chosen(pool) == 2
    assert chosen(pool, tried={pool.replicas[2]}) is None
    pool.enter(pool.replicas[2], "ended")
    assert chosen(pool) is None


def test_servers_of_several_models_take_requests_before_they_are_ready_where_none_is():
    pool = ReplicaPool(RoutingConfig(), partial=True)
    for number, phase in enumerate(("starting", "unready", "draining", "ended")):
        pool.add(Replica(number=number, url="http://127.0.0.1:1", phase=phase, answers=True))
    assert {each.number for each in pool.usable()} == {0, 1}
    pool.suspect(pool.replicas[1])
    assert [each.number for each in pool.usable()] == [0]
    pool.enter(pool.replicas[1], "ready")
    assert [each.number for each in pool.usable()] == [1]
    other = pool_of(1)
    other.heard(other.replicas[0], True)
    other.enter(other.replicas[0], "unready")
    assert other.choose(()) is None


def test_a_new_replica_has_no_prefixes():
    pool = pool_of(1)
    pool.choose(LONG)
    pool.add(Replica(number=0, url="http://127.0.0.1:2", phase="ready"))
    assert pool.choose(LONG).matched == 0


def test_a_request_waits_for_a_replica_to_be_ready():
    async def run():
        pool = pool_of(1)
        pool.enter(pool.replicas[0], "unready")
        assert not await pool.wait(0.01)
        waiting = [asyncio.create_task(pool.wait(60)) for _ in range(3)]
        await asyncio.sleep(0)
        pool.enter(pool.replicas[0], "draining")
        await asyncio.sleep(0)
        assert not any(each.done() for each in waiting)
        pool.enter(pool.replicas[0], "ready")
        assert await asyncio.gather(*waiting) == [True] * 3

    asyncio.run(run())


@pytest.mark.parametrize("name", ["balance_threshold", "stall_limit", "max_retries"])
def test_senseless_numbers_are_refused(name):
    with pytest.raises(ConfigError, match=f"{name}=-1 is"):
        RoutingConfig(**{name: -1})
