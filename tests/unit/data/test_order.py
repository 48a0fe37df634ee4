"""The order of records: a permutation in each epoch, exact shares of a mixture, every rank once."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fornax.config.errors import DataError
from fornax.data.order import Order, draws, permuted, schedule


@settings(deadline=None)
@given(size=st.integers(1, 3000), seed=st.integers(0, 2**32 - 1))
def test_permuted_is_a_permutation(size, seed):
    assert sorted(permuted(np.arange(size), size, seed)) == list(range(size))


@settings(deadline=None)
@given(size=st.integers(1, 10**12), seed=st.integers(0, 2**32 - 1), data=st.data())
def test_permuted_stays_in_range_and_needs_no_neighbours(size, seed, data):
    index = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=20, unique=True))
    together = permuted(np.array(index), size, seed)
    assert len(set(together.tolist())) == len(index)
    assert ((together >= 0) & (together < size)).all()
    assert together.tolist() == [int(permuted(np.array([i]), size, seed)[0]) for i in index]


def test_permuted_spreads_neighbours():
    images = permuted(np.arange(5000), 5000, 7)
    assert abs(np.corrcoef(np.arange(5000), images)[0, 1]) < 0.05
    assert abs(np.corrcoef(images[:-1], images[1:])[0, 1]) < 0.05
    assert not np.array_equal(images, permuted(np.arange(5000), 5000, 8))


@settings(deadline=None)
@given(weights=st.lists(st.floats(0.001, 1000), min_size=1, max_size=6))
def test_draws_follow_the_weights(weights):
    counts = draws(weights, 4096)
    assert counts.sum() == 4096
    assert np.abs(counts / 4096 - np.array(weights) / sum(weights)).max() <= 1 / 4096


def test_schedule_spreads_the_draws():
    steps = schedule(np.array([6, 2]))
    assert np.bincount(steps).tolist() == [6, 2]
    assert np.diff(np.flatnonzero(steps == 1)).tolist() == [4]


def order(sizes, weights, *, shards=4, shuffle=True, epochs=None) -> Order:
    names = [f"p{i}" for i in range(len(sizes))]
    return Order(names, sizes, weights, shards=shards, seed=3, shuffle=shuffle, epochs=epochs)


@pytest.mark.slow
@settings(deadline=None, max_examples=40)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    shards=st.sampled_from([1, 2, 4, 8]),
    epochs=st.integers(1, 3),
    chunk=st.integers(1, 7),
    data=st.data(),
)
def test_a_finite_order_gives_every_record_once_per_epoch(sizes, shards, epochs, chunk, data):
    weights = [data.draw(st.floats(0.1, 5.0)) for _ in sizes]
    mixed = order(sizes, weights, shards=shards, epochs=epochs)
    seen = []
    for shard in range(shards):
        length = mixed.length(shard)
        assert length is not None
        for start in range(0, length, chunk):
            places = mixed.places(shard, start, min(chunk, length - start))
            rows = zip(places.part, places.epoch, places.index, strict=True)
            seen += [tuple(int(x) for x in row) for row in rows if row[0] >= 0]
        if length:
            assert mixed.places(shard, length - 1, 1).part[0] >= 0
    expected = [(p, e, i) for p, n in enumerate(sizes) for e in range(epochs) for i in range(n)]
    assert sorted(seen) == expected


def test_an_endless_order_has_no_length():
    assert order([5], [1.0]).length(0) is None


def test_a_weight_too_small_to_draw_is_named():
    with pytest.raises(DataError, match="'p1' has weight 1e-09"):
        order([5, 5], [1.0, 1e-9])
