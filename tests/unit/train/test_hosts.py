"""Which rows a process reads, and what it makes of them."""

from typing import Any

import numpy as np
import pytest

from fornax.config.errors import ShardingError
from fornax.mesh import DEFAULT_RULES, MeshConfig, make_mesh
from fornax.train.hosts import abstract_batch, check_rows, find_hosts, split_between, to_global
from fornax.train.task import Hosts


def test_one_process_reads_everything():
    mesh = make_mesh(MeshConfig())
    assert find_hosts(16, mesh, DEFAULT_RULES) == Hosts(index=0, count=1)


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ({0: {(0, 4)}, 1: {(4, 8)}}, {0: (0, 2), 1: (1, 2)}),
        ({0: {(0, 2), (2, 4)}, 1: {(4, 6), (6, 8)}}, {0: (0, 2), 1: (1, 2)}),
        ({0: {(0, 8)}, 1: {(0, 8)}}, {0: (0, 1), 1: (0, 1)}),
        (
            {0: {(0, 4)}, 1: {(0, 4)}, 2: {(4, 8)}, 3: {(4, 8)}},
            {0: (0, 2), 1: (0, 2), 2: (1, 2), 3: (1, 2)},
        ),
        ({0: {(0, 2), (4, 6)}, 1: {(2, 4), (6, 8)}}, {0: (0, 2), 1: (1, 2)}),
    ],
    ids=["one device each", "two devices each", "tensor parallel", "both", "interleaved"],
)
def test_each_process_reads_what_its_devices_hold(spans: Any, expected: Any):
    found = {p: split_between(spans, 8, p) for p in spans}
    assert {p: (hosts.index, hosts.count) for p, hosts in found.items()} == expected


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ({0: {(0, 4)}, 1: {(0, 2), (4, 6)}, 2: {(2, 4), (6, 8)}}, "overlapping rows"),
        ({0: {(0, 6)}, 1: {(6, 8)}}, "unequal or"),
        ({0: {(0, 4)}, 1: {(4, 6)}}, "unequal or"),
    ],
)
def test_rows_that_are_no_equal_parts_are_refused(spans: Any, message: str):
    with pytest.raises(ShardingError, match=message):
        split_between(spans, 8, 0)


def test_a_global_batch_holds_the_rows_where_the_rules_say():
    mesh = make_mesh(MeshConfig(data=4, fsdp=1, context=2))
    local = {
        "tokens": np.arange(32, dtype=np.int32).reshape(8, 4),
        "image": np.zeros((8, 5, 5, 3), np.float32),
        "weight": np.ones(8, np.float32),
    }
    shapes = abstract_batch(local, Hosts(), mesh, DEFAULT_RULES)
    arrays = to_global(local, shapes)
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, local[name])
    shards = {name: array.sharding.shard_shape(array.shape) for name, array in arrays.items()}
    assert shards == {"tokens": (2, 2), "image": (2, 5, 5, 3), "weight": (2,)}


def test_rows_divide_over_shards_times_micro_batches():
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    check_rows(16, 4, mesh, DEFAULT_RULES)
    with pytest.raises(ShardingError, match="use a multiple of 16, such as 32, or another mesh"):
        check_rows(24, 4, mesh, DEFAULT_RULES)
