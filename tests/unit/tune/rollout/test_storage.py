"""Arrays in JSON come back bit for bit."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fornax.config.errors import DataError
from fornax.tune.rollout.storage import array_state, from_array_state

ARRAYS = hnp.arrays(
    st.sampled_from([np.dtype(d) for d in ("?", "u1", "<i4", "<i8", "<f4", "<f8")]),
    hnp.array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=3),
)
TREES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=3) | st.floats() | ARRAYS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return (
            one.dtype == other.dtype
            and one.shape == other.shape
            and one.tobytes() == other.tobytes()
        )
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(v, other[k]) for k, v in one.items())
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_same, one, other))
    return type(one) is type(other) and (one == other or one != one)


@given(TREES)
def test_what_was_given_comes_back(tree: Any) -> None:
    text = json.dumps(array_state(tree), allow_nan=False)
    assert _same(tree, from_array_state(json.loads(text)))


def test_what_has_no_plain_form_is_refused() -> None:
    assert array_state({"a": (np.int64(3), np.float32(0.5))}) == {"a": [3, 0.5]}
    for bad in (object(), np.asarray(["a"]), {1: 2}, {"__array__": 1}):
        with pytest.raises(DataError, match="a position cannot hold"):
            array_state(bad)
