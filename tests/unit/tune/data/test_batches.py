"""Batches: every token in its place, one order for any number of hosts, exact positions."""

import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fornax.config.errors import ConfigError, DataError
from fornax.data import Hosts
from fornax.tune.data import (
    Encoded,
    IndexStream,
    Loaded,
    LoaderOptions,
    PairTokens,
    Summary,
    buckets_up_to,
    preference_batches,
    sft_batches,
)

LENGTH = 32
ARRAYS = ("tokens", "targets", "segment_ids", "positions", "loss_weights")
Stream = Any


def _sequence(number: int, length: int, prompt: int) -> Encoded:
    """A sequence whose tokens say where they come from: 100 * number + place."""
    tokens = np.arange(length, dtype=np.int32) + 100 * number
    return Encoded(tokens=tokens, mask=np.arange(length) >= prompt, prompt=prompt)


def _loaded(items: list[Any]) -> Loaded[Any]:
    return Loaded(items=items, summary=Summary(name="test"))


def _examples(count: int, seed: int = 0) -> Loaded[Encoded]:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(2, LENGTH + 1, count).tolist()
    return _loaded([_sequence(i + 1, n, int(rng.integers(1, n))) for i, n in enumerate(lengths)])


def _pairs(count: int) -> Loaded[PairTokens]:
    rng = np.random.default_rng(1)
    return _loaded(
        [
            PairTokens(
                chosen=_sequence(2 * i + 1, int(rng.integers(4, 30)), 3),
                rejected=_sequence(2 * i + 2, int(rng.integers(4, 30)), 3),
                margin=float(i),
            )
            for i in range(count)
        ]
    )


def _packed(feed: LoaderOptions) -> Stream:
    return sft_batches(_examples(37), feed, LENGTH)


def _padded(feed: LoaderOptions) -> Stream:
    return sft_batches(_examples(37), feed, LENGTH, packing="none", buckets=(8, 16, 32))


def _paired(feed: LoaderOptions) -> Stream:
    logps = {"reference_logps": np.arange(42, dtype=np.float32).reshape(21, 2)}
    return preference_batches(_pairs(21), feed, LENGTH, columns=logps, buckets=(16, 32))


STREAMS = (_packed, _padded, _paired)


def _learned(batch: dict[str, np.ndarray]) -> Iterator[tuple[int, int]]:
    """Each learned target, with the token it is predicted from, checked for isolation."""
    seen = batch["loss_weights"] > 0
    assert set(np.unique(batch["loss_weights"])) <= {0.0, 1.0}
    assert (batch["segment_ids"][seen] > 0).all()
    np.testing.assert_array_equal(batch["targets"][seen], batch["tokens"][seen] + 1)
    np.testing.assert_array_equal(
        batch["positions"][batch["segment_ids"] > 0],
        batch["tokens"][batch["segment_ids"] > 0] % 100,
    )
    yield from zip(batch["tokens"][seen].tolist(), batch["targets"][seen].tolist(), strict=True)


@settings(max_examples=25)
@given(
    count=st.integers(1, 60),
    seed=st.integers(0, 5),
    rows=st.sampled_from([1, 2, 8]),
    epochs=st.integers(1, 2),
    packing=st.sampled_from(["best_fit", "none"]),
)
def test_every_learned_token_comes_once_in_an_epoch(
    count: int, seed: int, rows: int, epochs: int, packing: Any
) -> None:
    loaded = _examples(count, seed)
    feed = LoaderOptions(batch_size=rows, seed=seed, epochs=epochs)
    with_batches = sft_batches(loaded, feed, LENGTH, packing=packing)
    found = sorted(pair for batch in with_batches for pair in _learned(batch))
    with_batches.close()
    expected = [
        (int(item.tokens[i]) - 1, int(item.tokens[i]))
        for item in loaded.items
        for i in np.flatnonzero(item.mask)
    ]
    assert found == sorted(expected * epochs)


def test_packed_rows_hold_several_examples_apart() -> None:
    stream = _packed(LoaderOptions(batch_size=4, epochs=1))
    batches = list(stream)
    assert len(batches) == stream.batches_per_epoch()
    assert stream.batches_per_epoch() <= stream.batches_in(1.5) <= stream.batches_in(2)
    assert {batch["tokens"].shape for batch in batches} == {(4, LENGTH)}
    assert max(int(batch["segment_ids"].max()) for batch in batches) > 1
    for batch in batches:
        for tokens, segments in zip(batch["tokens"], batch["segment_ids"], strict=True):
            owners = {s: set((tokens[segments == s] // 100).tolist()) for s in set(segments) - {0}}
            assert all(len(numbers) == 1 for numbers in owners.values())


def test_epochs_of_a_small_set_do_not_mix_when_packed() -> None:
    stream = sft_batches(_examples(40), LoaderOptions(batch_size=1, seed=1), LENGTH)
    rows = itertools.islice(stream, stream.batches_per_epoch() // 2)
    starts = [row["tokens"][(row["positions"] == 0) & (row["segment_ids"] > 0)] for row in rows]
    found = np.concatenate(starts).tolist()
    assert len(found) > 10
    assert len(set(found)) == len(found)
    stream.close()


def test_padded_rows_take_the_shortest_length_that_holds_the_batch() -> None:
    for batch in _padded(LoaderOptions(batch_size=2, epochs=1)):
        longest = int((batch["segment_ids"] > 0).sum(1).max())
        assert batch["tokens"].shape == (2, next(n for n in (8, 16, 32) if n >= longest))
    assert buckets_up_to(500) == (64, 128, 256, 500)
    assert buckets_up_to(20) == (20,)


@pytest.mark.parametrize("make", STREAMS)
def test_hosts_together_read_the_batches_of_one(make: Callable[[LoaderOptions], Stream]) -> None:
    whole = make(LoaderOptions(batch_size=8, seed=3))
    for hosts in (2, 3, 4, 5, 9):
        parts = [
            make(LoaderOptions(batch_size=8, seed=3, hosts=Hosts(index=h, count=hosts)))
            for h in range(hosts)
        ]
        for expected, *found in itertools.islice(zip(whole, *parts, strict=False), 4):
            for name, array in expected.items():
                rows = np.concatenate([f[name] for f in found])
                np.testing.assert_array_equal(rows[:8], array)
                assert (rows[8:] == (-1 if name == "example" else 0)).all()
        _close([whole, *parts])
        whole = make(LoaderOptions(batch_size=8, seed=3))
    _close([whole])


@pytest.mark.parametrize("make", STREAMS)
def test_a_position_goes_on_exactly_on_other_hosts(make: Callable[[LoaderOptions], Stream]) -> None:
    whole = make(LoaderOptions(batch_size=8, seed=3, virtual_shards=8))
    parts = [
        make(LoaderOptions(batch_size=8, seed=3, hosts=Hosts(index=h, count=3))) for h in range(3)
    ]
    for _ in range(3):
        for stream in (whole, *parts):
            next(stream)
    state = json.loads(json.dumps({k: v for part in parts for k, v in part.state().items()}))
    assert sorted(state) == [str(shard) for shard in range(8)]
    again = make(LoaderOptions(batch_size=8, seed=3, virtual_shards=8))
    again.restore({int(shard): value for shard, value in state.items()})
    for _ in range(3):
        expected, found = next(whole), next(again)
        assert expected.keys() == found.keys()
        for name, array in expected.items():
            np.testing.assert_array_equal(found[name], array)
    _close([whole, again, *parts])


@pytest.mark.parametrize("make", STREAMS)
def test_a_position_of_another_order_is_refused(make: Callable[[LoaderOptions], Stream]) -> None:
    first = make(LoaderOptions(batch_size=8, seed=3))
    next(first)
    other = make(LoaderOptions(batch_size=8, seed=4))
    with pytest.raises(DataError, match="seed was 3 and is 4"):
        other.restore(first.state())
    other.restore(first.state(), allow_changes=True)
    next(other)
    _close([first, other])


def _close(streams: list[Stream]) -> None:
    for stream in streams:
        stream.close()


def test_a_position_in_other_examples_is_refused() -> None:
    feed = LoaderOptions(batch_size=4)
    stream = sft_batches(_examples(9), feed, LENGTH, packing="none")
    other = sft_batches(_examples(9, seed=1), feed, LENGTH, packing="none")
    with pytest.raises(DataError, match="tokens was"):
        other.restore(stream.state())


def test_a_position_counts_examples_where_the_batch_may_change() -> None:
    small = IndexStream(20, LoaderOptions(batch_size=2, seed=1))
    for _ in range(6):
        next(small)
    large = IndexStream(20, LoaderOptions(batch_size=4, seed=1))
    with pytest.raises(DataError, match="batch_size was 2 and is 4"):
        large.restore(small.state())
    large.restore(small.state(), allow_changes=True)
    both = [*next(small).index, *next(small).index]
    assert next(large).index.tolist() == both


def test_epochs_are_shuffled_by_the_seed_and_complete() -> None:
    def picks(**options: Any) -> list[int]:
        stream = IndexStream(10, LoaderOptions(batch_size=4, epochs=2, **options))
        assert (stream.batches_per_epoch(), stream.total_batches()) == (3, 5)
        assert stream.batches_in(0.3) == 1
        return [int(i) for pick in stream for i in pick.index]

    first = picks(seed=1)
    assert first == picks(seed=1) != picks(seed=2)
    assert sorted(first[:10]) == sorted(first[10:]) == list(range(10))
    assert first[:10] != first[10:]
    assert picks(shuffle=False) == [*range(10), *range(10)]
    last = list(IndexStream(3, LoaderOptions(batch_size=2, epochs=1)))[-1]
    assert (last.index.tolist()[1], last.epoch.tolist()) == (-1, [0, -1])


def test_pairs_stand_side_by_side_with_their_columns() -> None:
    pairs = _pairs(21).items
    seen = []
    for batch in _paired(LoaderOptions(batch_size=8, epochs=1)):
        assert all(batch[name].shape == (8, 2, batch["tokens"].shape[2]) for name in ARRAYS)
        list(_learned(batch))
        for row, example in enumerate(batch["example"].tolist()):
            if example < 0:
                assert not batch["segment_ids"][row].any()
                assert not batch["reference_logps"][row].any()
                continue
            seen.append(example)
            for side, sequence in enumerate((pairs[example].chosen, pairs[example].rejected)):
                tokens = batch["tokens"][row, side, : sequence.length]
                np.testing.assert_array_equal(tokens, sequence.tokens)
                assert batch["loss_weights"][row, side].sum() == sequence.trained
            assert batch["margin"][row] == example
            assert batch["reference_logps"][row].tolist() == [2 * example, 2 * example + 1]
    assert sorted(seen) == list(range(21))


def test_columns_must_fit() -> None:
    for columns, said in (
        ({"a": np.zeros(3)}, "3 rows for 21"),
        ({"tokens": np.zeros(21)}, "taken"),
    ):
        with pytest.raises(ConfigError, match=said):
            preference_batches(_pairs(21), LoaderOptions(batch_size=8), LENGTH, columns=columns)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"batch_size": 0}, "must be at least 1"),
        ({"batch_size": 6, "virtual_shards": 4}, "does not divide into 4 virtual shards"),
        ({"batch_size": 8, "epochs": 0}, "epochs=0"),
    ],
)
def test_a_feed_that_cannot_be_dealt_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        LoaderOptions(**options)
