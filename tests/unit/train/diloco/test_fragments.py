"""Which parameters are exchanged together: all of them, each once, layer by layer."""

import jax.numpy as jnp
import numpy as np
import pytest

from fornax.config import ConfigError
from fornax.train.diloco import DilocoConfig
from fornax.train.diloco.fragments import make_fragments

SHAPES = [(7, 3, 2), (5, 4), (7, 2), (3,), ()]
STACKED = [True, False, True, False, False]


@pytest.mark.parametrize("count", [1, 3, 7])
def test_every_value_is_in_one_fragment(count: int):
    fragments = make_fragments(SHAPES, STACKED, count)
    leaves = [jnp.zeros(shape) for shape in SHAPES]
    for number, fragment in enumerate(fragments):
        size = -(-fragment.size // 128) * 128
        marked = fragment.flat(fragment.take(leaves), size) + number + 1
        leaves = fragment.put(leaves, fragment.shaped(marked))
    assert sum(fragment.size for fragment in fragments) == sum(np.prod(s) for s in SHAPES)
    for leaf, stacked in zip(leaves, STACKED, strict=True):
        if stacked:
            for layer, values in enumerate(np.asarray(leaf)):
                assert (values == layer % count + 1).all()
        else:
            assert len(set(np.asarray(leaf).reshape(-1))) == 1
            assert np.asarray(leaf).min() > 0


def test_whole_arrays_go_to_the_smallest_fragment():
    fragments = make_fragments([(4, 10), (100,), (90,), (5,)], [True, False, False, False], 2)
    assert [fragment.size for fragment in fragments] == [20 + 100, 20 + 90 + 5]


def test_more_fragments_than_layers_are_refused():
    with pytest.raises(ConfigError, match=r"num_fragments=4: 2 of them would have no parameters"):
        make_fragments([(2, 8)], [True], 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"sync_every": 10, "num_fragments": 3},
            "sync_every=10 is not a multiple of num_fragments=3",
        ),
        ({"sync_every": 0}, "must be 1 or more"),
        (
            {"sync_every": 12, "num_fragments": 3, "fragment_sync_delay": 4},
            "fragment_sync_delay=4 must lie between 0 and 3",
        ),
        ({"fragment_update_alpha": 1.0}, "must be 0 or more and below 1"),
        ({"outer_learning_rate": 0.0}, "must be above 0"),
        ({"outer_momentum": 1.0}, "at least 0 and below 1"),
        ({"timeout": 0.0}, "timeout=0.0 are seconds"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(changes: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        DilocoConfig(**changes)


def test_each_fragment_is_due_once_in_sync_every_steps():
    config = DilocoConfig(sync_every=12, num_fragments=3, fragment_sync_delay=3)
    due = {step: config.due(step) for step in range(25) if config.due(step) is not None}
    assert due == {4: 0, 8: 1, 12: 2, 16: 0, 20: 1, 24: 2}
