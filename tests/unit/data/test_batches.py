"""A position is exact under any interruption, packer, mixture and number of processes."""

import json
import math
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fornax.config.errors import ConfigError, DataError
from fornax.data import (
    ArrayRecord,
    BestFit,
    ConcatThenSplit,
    DataConfig,
    FirstFit,
    Hosts,
    Mixture,
    NoPacking,
    Part,
    Prefetch,
    RecordRange,
    StepRange,
    open_batches,
)
from fornax.data.stream import StageTimes

PACKINGS = [
    ConcatThenSplit(),
    FirstFit(bins=3),
    FirstFit(bins=2, long_documents="truncate"),
    BestFit(bins=4),
    BestFit(bins=2, long_documents="drop"),
    NoPacking(),
]
LENGTHS = [3, 17, 1, 9, 40, 5, 2, 11, 8, 8, 30, 6, 4, 13, 7, 21, 1, 1, 19, 10]


@pytest.fixture(scope="module")
def sources(token_files) -> dict[str, ArrayRecord]:
    make = {"a": (LENGTHS, 1), "b": ([4, 4, 9, 2, 33, 6, 7], 1001), "c": ([12, 1, 5], 2001)}
    return {
        name: ArrayRecord(path=str(token_files(name, lengths, first)), content="uint16")
        for name, (lengths, first) in make.items()
    }


def mixture(sources, weights: dict[str, float]) -> Mixture:
    parts = [Part(name=n, source=sources[n], weight=w) for n, w in weights.items()]
    return Mixture(parts=tuple(parts))


def config_of(sources, weights=None, **fields) -> DataConfig:
    source = mixture(sources, weights) if weights else sources["a"]
    fields.setdefault("prefetch", Prefetch(buffer=0))
    return DataConfig(source=source, virtual_shards=fields.pop("virtual_shards", 4), **fields)


def take(batches, count: int) -> list[dict[str, np.ndarray]]:
    return [next(batches) for _ in range(count)]


def global_batches(config, hosts: int, count: int, state=None, batch_size=8, seq_len=16):
    """`count` global batches read by `hosts` iterators, and the states of all shards after them.

    What the last hosts hold beyond a batch is checked to be padding, and cut off.
    """
    made = []
    states: dict[int, dict] = {}
    for host in range(hosts):
        batches = open_batches(
            config, batch_size=batch_size, seq_len=seq_len, process_index=host, process_count=hosts
        )
        if state is not None:
            batches.restore(state)
        made.append(take(batches, count))
        for shard, position in batches.state().items():
            assert states.setdefault(shard, position) == position
        batches.close()
    joined = [whole_batch([host[i] for host in made], batch_size) for i in range(count)]
    # A state must survive being written as JSON.
    return joined, {int(k): v for k, v in json.loads(json.dumps(states)).items()}


def whole_batch(parts, batch_size: int) -> dict[str, np.ndarray]:
    """The rows of all hosts in order; rows past the batch's end are zeros."""
    assert len({len(part["tokens"]) for part in parts}) == 1
    rows = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    for name, array in rows.items():
        assert not array[batch_size:].any(), name
    return {name: array[:batch_size] for name, array in rows.items()}


def assert_same(a, b) -> None:
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        for name in ("tokens", "targets", "loss_weights", "segment_ids", "positions"):
            np.testing.assert_array_equal(x[name], y[name], err_msg=name)


@pytest.mark.slow
@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    packing=st.sampled_from(PACKINGS),
    weights=st.sampled_from([None, {"a": 1.0, "b": 1.0}, {"a": 5.0, "b": 1.5, "c": 0.2}]),
    cuts=st.lists(
        st.tuples(st.integers(1, 9), st.sampled_from([1, 2, 3, 4, 5, 8, 9])), min_size=1, max_size=4
    ),
    seed=st.integers(0, 5),
    read_batch=st.sampled_from([1, 3, 64]),
)
def test_interruptions_and_other_host_counts_change_nothing(
    sources, packing, weights, cuts, seed, read_batch
):
    config = config_of(sources, weights, packing=packing, seed=seed, read_batch=read_batch)
    expected, _ = global_batches(config, 1, sum(count for count, _ in cuts))
    found = []
    state = None
    for count, hosts in cuts:
        made, state = global_batches(config, hosts, count, state)
        found += made
    assert_same(found, expected)


@pytest.mark.slow
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    shards=st.integers(1, 9),
    each=st.integers(1, 4),
    hosts=st.integers(1, 12),
    devices=st.integers(1, 4),
)
def test_any_hosts_read_the_batches_of_one(sources, shards, each, hosts, devices):
    """Every row once, in its place; positions of the shards that any of them reads, all of them."""
    config, size = config_of(sources, virtual_shards=shards), shards * each
    expected, position = global_batches(config, 1, 3, batch_size=size)
    made, states = [], {}
    for host in range(hosts):
        with open_batches(
            config,
            batch_size=size,
            seq_len=16,
            process_index=host,
            process_count=hosts,
            row_multiple=hosts * devices,
        ) as batches:
            made.append(take(batches, 3))
            states |= batches.state()
    rows = {len(batch["tokens"]) for batches in made for batch in batches}
    assert rows == {-(-size // (hosts * devices)) * devices}
    assert_same([whole_batch([host[i] for host in made], size) for i in range(3)], expected)
    assert states == position


@given(batch_size=st.integers(1, 200), count=st.integers(1, 16), multiple=st.integers(1, 64))
def test_hosts_share_the_rows_of_a_batch(batch_size, count, multiple):
    """Equal arrays, the least padding that allows them, every row on one host, in order."""
    all_hosts = [Hosts(index=i, count=count, multiple=multiple) for i in range(count)]
    unit = math.lcm(count, multiple)
    (padded,) = {hosts.padded(batch_size) for hosts in all_hosts}
    (size,) = {hosts.size(batch_size) for hosts in all_hosts}
    assert padded == size * count
    assert padded % unit == 0
    assert batch_size <= padded < batch_size + unit
    assert [row for hosts in all_hosts for row in hosts.rows(batch_size)] == [*range(batch_size)]
    assert all(len(hosts.rows(batch_size)) <= size for hosts in all_hosts)


@pytest.mark.slow
@pytest.mark.parametrize("prefetch", [Prefetch(buffer=3), Prefetch(buffer=2, workers=2)])
def test_prefetch_changes_neither_batches_nor_position(sources, prefetch):
    plain = config_of(sources, {"a": 2.0, "b": 1.0}, packing=FirstFit(bins=3))
    ahead = config_of(sources, {"a": 2.0, "b": 1.0}, packing=FirstFit(bins=3), prefetch=prefetch)
    expected, _ = global_batches(plain, 1, 9)
    first, state = global_batches(ahead, 1, 4)
    rest, _ = global_batches(ahead, 1, 5, state)
    assert_same(first + rest, expected)


def documents_in(batches) -> Counter:
    """Tokens of every document (a token's value names it)."""
    seen: Counter = Counter()
    for batch in batches:
        seen.update(batch["tokens"][batch["segment_ids"] > 0].tolist())
    return seen


@pytest.mark.parametrize(
    "packing", [ConcatThenSplit(), FirstFit(bins=3), BestFit(bins=3), NoPacking()]
)
@pytest.mark.parametrize("epochs", [1, 3])
def test_every_token_comes_once_per_epoch(sources, packing, epochs):
    config = config_of(sources, {"a": 3.0, "b": 1.0}, packing=packing, epochs=epochs)
    seen = documents_in(open_batches(config, batch_size=4, seq_len=16))
    expected = {1 + i: epochs * n for i, n in enumerate(LENGTHS)}
    expected |= {1001 + i: epochs * n for i, n in enumerate([4, 4, 9, 2, 33, 6, 7])}
    assert seen == expected


def on_hosts(hosts: int, read: Callable[..., Any]) -> list[Any]:
    """What `read(process_index, agree)` gives on each of `hosts` threads that agree."""
    given: list[int] = []
    answer: list[int] = []

    def settle() -> None:
        answer[:] = [max(given)]
        given.clear()

    together = threading.Barrier(hosts, action=settle, timeout=240)

    def agree(number: int) -> int:
        given.append(number)
        together.wait()
        return answer[0]

    with ThreadPoolExecutor(hosts) as pool:
        return list(pool.map(lambda host: read(host, agree), range(hosts)))


@pytest.mark.parametrize("buffer", [0, 3, 16])
@pytest.mark.parametrize("hosts", [2, 3, 4, 5])
def test_a_finite_split_ends_at_the_same_batch_on_every_host(sources, hosts, buffer):
    """Also after a stop in its middle, whichever process has the longest shard."""
    config = config_of(
        sources, packing=FirstFit(bins=2), epochs=1, prefetch=Prefetch(buffer=buffer)
    )
    alone = list(open_batches(config, batch_size=4, seq_len=16))
    half = len(alone) // 2

    def opened(host, agree):
        return open_batches(
            config,
            batch_size=4,
            seq_len=16,
            process_index=host,
            process_count=hosts,
            agree=agree,
        )

    def first(host, agree):
        with opened(host, agree) as batches:
            return take(batches, half), batches.state()

    def rest(host, agree):
        with opened(host, agree) as batches:
            batches.restore(state)
            found = list(batches)
            assert next(batches, None) is None
            return found

    begun = on_hosts(hosts, first)
    state = {shard: position for _, states in begun for shard, position in states.items()}
    ended = on_hosts(hosts, rest)
    read = [[*made, *left] for (made, _), left in zip(begun, ended, strict=True)]
    assert {len(batches) for batches in read} == {len(alone)}
    joined = [whole_batch([host[i] for host in read], 4) for i in range(len(alone))]
    assert_same(joined, alone)


def test_a_host_reads_its_own_records_of_a_finite_split_and_no_more(token_files):
    source = ArrayRecord(path=str(token_files("many", [16] * 4000)), content="uint16")
    config = config_of({"a": source}, epochs=1, read_batch=8, prefetch=Prefetch(buffer=4))

    def read(host, agree):
        times = StageTimes()
        with open_batches(
            config,
            batch_size=4,
            seq_len=16,
            process_index=host,
            process_count=4,
            times=times,
            agree=agree,
        ) as batches:
            take(batches, 10)
        return sum(stage.entered for (_, name), stage in times.stages.items() if name == "read")

    assert max(on_hosts(4, read)) <= 100


def test_hosts_that_cannot_agree_on_an_end_are_refused(sources):
    with pytest.raises(DataError, match="read by 2 processes, needs `agree`"):
        open_batches(config_of(sources, epochs=1), batch_size=4, seq_len=16, process_count=2)


def test_each_epoch_has_its_own_order(token_files):
    source = ArrayRecord(path=str(token_files("one", [1] * 40)), content="uint16")
    config = DataConfig(source=source, virtual_shards=1, prefetch=Prefetch(buffer=0))
    first, second = (
        b["tokens"][0] for b in take(open_batches(config, batch_size=1, seq_len=40), 2)
    )
    assert sorted(first) == sorted(second) == list(range(1, 41))
    assert list(first) != list(second)
    assert list(first) != sorted(first)


def test_without_shuffle_records_come_in_order(token_files):
    source = ArrayRecord(path=str(token_files("ordered", [1] * 40)), content="uint16")
    config = DataConfig(source=source, virtual_shards=1, shuffle=False, prefetch=Prefetch(buffer=0))
    batch = next(open_batches(config, batch_size=1, seq_len=40))
    assert batch["tokens"][0].tolist() == list(range(1, 41))


def test_mixture_draws_records_by_weight(token_files):
    parts = tuple(
        Part(
            name=name,
            source=ArrayRecord(path=str(token_files(name, [1] * 50, first)), content="uint16"),
            weight=weight,
        )
        for name, first, weight in (("x", 1, 3.0), ("y", 1001, 1.0))
    )
    config = DataConfig(source=Mixture(parts=parts), virtual_shards=4, prefetch=Prefetch(buffer=0))
    batches = take(open_batches(config, batch_size=4, seq_len=100), 10)
    tokens = np.concatenate([b["tokens"] for b in batches])
    assert np.mean(tokens < 1000) == pytest.approx(0.75, abs=0.005)
    # Every row is mixed, not only the whole batch.
    assert ((tokens < 1000).mean(axis=1) > 0.6).all()


def test_targets_are_the_next_token_of_the_same_document(tmp_path):
    from fornax.data.sources.array_record import open_writer

    path = tmp_path / "counting.array_record"
    writer = open_writer(path, compression=False)
    for start, length in ((100, 5), (200, 7), (300, 30)):
        writer.write(np.arange(start, start + length, dtype="<u2").tobytes())
    writer.close()
    config = DataConfig(
        source=ArrayRecord(path=str(path), content="uint16"),
        virtual_shards=1,
        shuffle=False,
        epochs=1,
        prefetch=Prefetch(buffer=0),
    )
    rows = list(open_batches(config, batch_size=1, seq_len=16))
    first = {name: array[0] for name, array in rows[0].items()}
    assert first["tokens"].tolist() == [*range(100, 105), *range(200, 207), *range(300, 304)]
    assert first["segment_ids"].tolist() == [1] * 5 + [2] * 7 + [3] * 4
    assert first["positions"].tolist() == [*range(5), *range(7), *range(4)]
    # The documents' last tokens have no target; the cut document's next token is in the next row.
    assert first["loss_weights"].tolist() == [1] * 4 + [0] + [1] * 6 + [0] + [1] * 4
    expected = [101, 102, 103, 104, 0, *range(201, 207), 0, 301, 302, 303, 304]
    assert first["targets"].tolist() == expected
    last = {name: array[0] for name, array in rows[-1].items()}
    assert last["segment_ids"].tolist() == [1] * 10 + [0] * 6
    assert last["loss_weights"].tolist() == [1] * 9 + [0] * 7
    assert last["positions"].tolist() == [*range(10)] + [0] * 6
    assert last["targets"][9:].tolist() == [0] * 7


def test_skipped_steps_leave_out_exactly_those_batches(sources):
    plain = config_of(sources)
    skipping = config_of(
        sources, skip_steps=(StepRange(start=3, stop=6), StepRange(start=8, stop=9))
    )
    expected, _ = global_batches(plain, 1, 12)
    found, _ = global_batches(skipping, 2, 8)
    assert_same(found, [expected[i] for i in (0, 1, 2, 6, 7, 9, 10, 11)])


def test_a_saved_position_can_skip_the_batches_that_follow(sources):
    expected, _ = global_batches(config_of(sources), 1, 8)
    _, state = global_batches(config_of(sources), 1, 3)
    skipping = config_of(sources, skip_steps=(StepRange(start=4, stop=6),))
    found, _ = global_batches(skipping, 1, 3, state)
    assert_same(found, [expected[i] for i in (3, 6, 7)])


def test_skipped_records_never_come(sources):
    config = config_of(
        sources,
        {"a": 1.0, "b": 1.0},
        epochs=1,
        skip_records=(RecordRange(part="b", start=2, stop=5),),
    )
    seen = documents_in(open_batches(config, batch_size=4, seq_len=16))
    assert {1003, 1004, 1005}.isdisjoint(seen)
    assert {1001, 1002, 1006, 1007} <= set(seen)


def test_holdout_splits_before_shuffling(token_files):
    source = ArrayRecord(path=str(token_files("split", [1] * 60)), content="uint16")
    config = DataConfig(
        source=source, virtual_shards=1, holdout=0.3, epochs=3, prefetch=Prefetch(buffer=0)
    )
    train = documents_in(open_batches(config, batch_size=1, seq_len=7))
    held_out = documents_in(open_batches(config, batch_size=1, seq_len=7, split="eval"))
    assert set(train).isdisjoint(held_out)
    assert set(train) | set(held_out) == set(range(1, 61))
    assert set(train.values()) == {3}
    assert set(held_out.values()) == {1}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"batch_size": 6}, ConfigError, "batch_size=6 does not divide into 4 virtual shards"),
        (
            {"process_index": 2, "process_count": 2},
            DataError,
            "host 2 of 2 .*numbered from 0 below",
        ),
        ({"split": "eval"}, DataError, "there is no eval split: set holdout"),
    ],
)
def test_what_does_not_divide_or_exist_is_named(sources, arguments, error, message):
    arguments = {"batch_size": 8, "seq_len": 16, **arguments}
    with pytest.raises(error, match=message):
        open_batches(config_of(sources), **arguments)


@pytest.mark.parametrize(
    ("fields", "seq_len", "message"),
    [
        ({"virtual_shards": 2}, 16, "virtual_shards=2 but the saved position has 4"),
        ({}, 32, "seq_len was 16 and is 32"),
        ({"seed": 9}, 16, "seed was 0 and is 9"),
        ({"packing": FirstFit()}, 16, "packing was"),
        ({"weights": {"a": 1.0, "b": 1.0}}, 16, "records was"),
    ],
)
def test_a_position_of_another_pipeline_is_refused(sources, fields, seq_len, message):
    _, state = global_batches(config_of(sources), 1, 2)
    batches = open_batches(config_of(sources, **fields), batch_size=8, seq_len=seq_len)
    with pytest.raises(DataError, match=message):
        batches.restore(state)


def test_a_change_can_be_accepted_but_for_the_shards(sources):
    _, state = global_batches(config_of(sources), 1, 2)
    changed = open_batches(config_of(sources), batch_size=8, seq_len=32)
    changed.restore(state, allow_changes=True)
    assert changed.state()[0]["record"] == state[0]["record"]
    assert next(changed)["tokens"].shape == (8, 32)
    with pytest.raises(DataError, match="fixed for the life of a run"):
        open_batches(config_of(sources, virtual_shards=2), batch_size=8, seq_len=16).restore(
            state, allow_changes=True
        )


def test_an_endless_run_of_documents_too_long_is_named(sources):
    packing = FirstFit(bins=2, long_documents="drop")
    config = DataConfig(
        source=sources["c"],
        packing=packing,
        virtual_shards=1,
        debug=True,
        skip_records=(RecordRange(start=1, stop=3),),
    )
    with pytest.raises(DataError, match="every document is longer than seq_len=8"):
        next(open_batches(config, batch_size=1, seq_len=8))


def test_a_missing_shard_is_named(sources):
    _, state = global_batches(config_of(sources), 1, 2)
    del state[2]
    with pytest.raises(DataError, match=r"lacks the virtual shards \[2\]"):
        open_batches(config_of(sources), batch_size=8, seq_len=16).restore(state)


def test_a_missing_file_is_named(tmp_path: Path):
    config = DataConfig(source=ArrayRecord(path=str(tmp_path / "none.array_record")))
    with pytest.raises(DataError, match="matches no file"):
        open_batches(config, batch_size=8, seq_len=16)
