"""Tensors as JSON: exact, or refused."""

import math

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from fornax.config import ServingError
from fornax.serving.v2.datatypes import DTYPES, datatype_of
from fornax.serving.v2.json_tensors import from_json, to_json

SHAPES = arrays.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=3)


def _through_json(array: np.ndarray) -> np.ndarray:
    text = orjson.dumps(to_json("x", array), option=orjson.OPT_SERIALIZE_NUMPY)
    return from_json("x", datatype_of(array.dtype), array.shape, orjson.loads(text))


@pytest.mark.parametrize("datatype", [name for name in DTYPES if name not in ("BYTES", "BF16")])
@given(data=st.data())
@settings(max_examples=30)
def test_what_is_written_is_read_again_exactly(datatype, data):
    array = data.draw(arrays.arrays(DTYPES[datatype], SHAPES))
    back = _through_json(array)
    assert back.dtype == array.dtype
    np.testing.assert_array_equal(back, array)
    if datatype.startswith("FP"):
        numbers = ~np.isnan(array)
        assert (np.signbit(back) == np.signbit(array))[numbers].all()


def test_bfloat16_and_bytes_are_read_again():
    array = np.array([1.1, math.nan, -math.inf, 3.3e38], DTYPES["BF16"])
    np.testing.assert_array_equal(_through_json(array).astype("f4"), array.astype("f4"))
    array = np.array(["é".encode(), b""], object)
    np.testing.assert_array_equal(_through_json(array), array)


def test_nested_and_flat_are_the_same():
    nested = [[[1, 2], [3, 4]], [[5, 6], [7, 8]]]
    flat = from_json("x", "INT8", [2, 2, 2], [1, 2, 3, 4, 5, 6, 7, 8])
    assert from_json("x", "INT8", [2, 2, 2], nested).tolist() == nested == flat.tolist()
    assert from_json("x", "FP32", [], 2).shape == ()
    assert from_json("x", "FP32", [2, 0], [[], []]).shape == (2, 0)


@pytest.mark.parametrize(
    ("datatype", "shape", "data", "words"),
    [
        ("INT8", [1], [128], "beyond INT8's range"),
        ("UINT64", [1], [-1], "beyond UINT64's range"),
        ("FP16", [1], [65536], "beyond FP16's range"),
        ("BF16", [1], [3.4e39], "beyond BF16's range"),
        ("FP32", [1], [1e39], "beyond FP32's range"),
        ("INT32", [1], [1.0], "INT32 takes integers"),
        ("INT32", [1], [True], "INT32 takes integers"),
        ("FP32", [1], [None], "FP32 takes numbers"),
        ("FP32", [1], ["nan"], "the strings NaN"),
        ("BOOL", [1], [1], "true or false"),
        ("BYTES", [1], [1], "BYTES takes strings"),
        ("BYTES", [1], ["\ud800"], "lone surrogate"),
        ("FP32", [3], [1, 2], "2 elements where shape [3] has 3"),
        ("FP32", [2, 2], [[1, 2], [3]], "ragged"),
        ("FP32", [2, 3], [[1, 2], [3, 4], [5, 6]], "ragged, or not nested"),
        ("FP32", [2, 2], [[1, 2], 3], "ragged"),
        ("FP32", [2], [1, [2]], "a list is among its data"),
        ("FP32", [4], [[1, 2], [3, 4]], "nested deeper"),
        ("FP32", [2, 2, 1], [[1, 2], [3, 4]], "neither flat nor nested"),
        ("FP32", [1], {"a": 1}, "not a list"),
        ("FP32", [1], "1", "not a list"),
    ],
)
def test_nothing_is_cut_or_rounded_in_silence(datatype, shape, data, words):
    with pytest.raises(ServingError, match="tensor 'x'") as refused:
        from_json("x", datatype, shape, data)
    assert words in str(refused.value)


def test_bytes_that_are_no_text_are_refused():
    with pytest.raises(ServingError, match="not UTF-8"):
        to_json("x", np.array([b"\xff"], object))
