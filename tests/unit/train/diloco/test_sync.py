"""A slice of eight devices over a real exchange, and what one slice hands to another."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from fornax.cluster.exchange import Exchange
from fornax.config.frames import LinkError
from fornax.train.diloco import DilocoConfig, OuterOptimizer
from fornax.train.diloco.link import Link, SlicePlace
from fornax.train.diloco.sync import SliceSync, pack, unpack
from fornax.train.session import Programs
from fornax.train.state import TrainState


def filled(programs: Programs, seed: int) -> TrainState:
    """A state of random numbers, laid out as a run's."""
    rng = np.random.default_rng(seed)

    def one(leaf: Any) -> Any:
        values = rng.integers(0, 99, leaf.shape)  # whole numbers: their differences are exact
        return jax.device_put(values.astype(leaf.dtype), leaf.sharding)

    return jax.tree.map(one, programs.abstract)


@pytest.fixture
def link() -> Iterator[Link]:
    """Of the only slice there is."""
    exchange = Exchange(slices=1, token="t", announce=lambda text, **_: None)
    exchange.start()
    place = SlicePlace(index=0, count=1, address=exchange.address, token="t")
    yield Link(place, rank=0, ranks=1, timeout=60, join_timeout=60)
    exchange.close()


def test_one_slice_that_averages_with_nobody_stays_where_it_is(laid: Any, link: Link):
    """Every fragment goes to the exchange and back, from and to devices that hold parts of it."""
    programs = laid(jax.devices(), fsdp=4, tensor=2)
    config = DilocoConfig(
        sync_every=4,
        num_fragments=2,
        fragment_sync_delay=1,
        outer_learning_rate=1.0,
        outer_momentum=0.0,
    )
    optimizer = OuterOptimizer(config, programs.parts, programs.abstract.params)
    state = filled(programs, 0)
    sync = SliceSync(config, optimizer, link)
    state, step, taken = sync.begin(list, {}, lambda place: (state, int(place or 0), None))
    assert (step, taken) == (0, False)
    state = replace(state, params=filled(programs, 1).params)
    kept = jax.tree.map(np.array, state.params)
    flights = []
    for step in range(1, 7):
        state, now = sync.after_step(step, state, last=step == 6)
        assert now == step
        flights.append(sync.in_flight)
    assert flights == [False, True, False, True, False, False]
    assert sync.numbers["slices"] == 1
    assert sync.numbers["exchange_bytes"] >= 2 * 4 * sum(x.size for x in jax.tree.leaves(kept))
    sync.finish(done=True)
    for got in (state.params, optimizer.common(sync.outer, state.params)):
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(kept), strict=True):
            np.testing.assert_array_equal(a, b)


def test_a_state_is_handed_over_part_by_part(laid: Any):
    programs = laid(jax.devices(), fsdp=4, tensor=2)
    state, other = filled(programs, 1), filled(programs, 2)
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    body = pack(state)
    assert len(body) == whole  # no part twice, though many arrays are on all devices
    found = unpack(other, body)
    jax.tree.map(np.testing.assert_array_equal, found, state)
    same = jax.tree.map(lambda x, y: x.sharding == y.sharding, found, state)
    assert all(jax.tree.leaves(same))
    for wrong in (body[:-1], body + b"x"):
        with pytest.raises(LinkError, match="than this one's"):
            unpack(other, wrong)
