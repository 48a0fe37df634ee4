"""Which rows a process reads, and what it makes of them."""

import re
from typing import Any

import numpy as np
import pytest

from fornax.config.errors import ShardingError
from fornax.mesh import DEFAULT_RULES, MeshConfig, make_mesh
from fornax.train.hosts import abstract_batch, find_hosts, padding_text, split_between, to_global
from fornax.train.task import Hosts


def test_one_process_reads_everything():
    mesh = make_mesh(MeshConfig())
    assert find_hosts(mesh, DEFAULT_RULES, 2) == Hosts(index=0, count=1, multiple=16)
    assert find_hosts(mesh, DEFAULT_RULES).rows(13) == range(13)
    assert find_hosts(mesh, DEFAULT_RULES).size(13) == 16


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


@pytest.mark.parametrize(
    ("batch_size", "shards", "accumulate", "said"),
    [
        (16, 4, 4, None),
        (8, 3, 1, "8 does not divide into 3 data shards: .* 9 rows of which 1 count.* 11% of"),
        (24, 4, 4, "24 .* 4 data shards x 4 micro-batches: .* 32 rows of which 8 .* 25% of"),
        (2, 8, 1, "8 rows of which 6 count nothing, 75% of the work; multiples of 8 have no"),
    ],
)
def test_what_padding_costs_is_said(batch_size: int, shards: int, accumulate: int, said: Any):
    text = padding_text(batch_size, shards, accumulate)
    assert text is None if said is None else re.search(said, str(text)), text


def test_what_is_beside_images_need_not_divide_over_the_length():
    """LTX-Video's three sizes and CLIP's 77 tokens on a mesh that divides long videos."""
    mesh = make_mesh(MeshConfig(data=4, fsdp=1, context=2))
    local = {
        "images": np.zeros((8, 3, 4, 4, 2), np.float32),
        "sizes": np.ones((8, 3), np.float32),
        "text_mask": np.ones((8, 77), np.int32),
    }
    shapes = abstract_batch(local, Hosts(), mesh, DEFAULT_RULES)
    assert {s.sharding.shard_shape(s.shape)[0] for s in shapes.values()} == {2}
    assert shapes["sizes"].sharding.shard_shape((8, 3)) == (2, 3)
