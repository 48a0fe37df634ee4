"""Raw tensors: every dtype there and back, and bytes that lie about themselves."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from fornax.config import ServingError
from fornax.serving.v2.datatypes import (
    DTYPES,
    MAX_ELEMENTS,
    count,
    datatype_of,
    decode_raw,
    dtype_of,
    encode_raw,
    raw_size,
)

NUMBERS = [name for name in DTYPES if name not in ("BYTES", "BF16")]
SHAPES = arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3)


@pytest.mark.parametrize("datatype", NUMBERS)
@given(data=st.data())
@settings(max_examples=30)
def test_numbers_come_back_bit_for_bit(datatype, data):
    array = data.draw(arrays.arrays(DTYPES[datatype], SHAPES))
    raw = encode_raw(array)
    back = decode_raw("x", datatype, list(array.shape), bytes(raw))
    assert back.dtype == array.dtype
    assert back.shape == array.shape
    assert back.tobytes() == array.tobytes()
    assert len(raw) == raw_size(array)


@given(st.lists(st.binary(max_size=5), min_size=6, max_size=6))
def test_bytes_come_back(elements):
    array = np.array([*elements, b""], object)[:6].reshape(2, 3)
    raw = encode_raw(array)
    back = decode_raw("x", "BYTES", [2, 3], raw)
    assert back.tolist() == array.tolist()
    assert len(raw) == raw_size(array)


def test_bfloat16_comes_back_as_bfloat16():
    array = np.array([1.5, -0.0, np.inf], ml_dtypes.bfloat16)
    back = decode_raw("x", "BF16", [3], encode_raw(array))
    assert datatype_of(back.dtype) == "BF16"
    assert back.tobytes() == array.tobytes()


def test_a_large_array_is_not_copied():
    array = np.arange(100_000, dtype=np.int32).reshape(100, 1000)
    raw = encode_raw(array)
    assert isinstance(raw, memoryview)
    assert np.shares_memory(np.frombuffer(raw, np.uint8), array)
    assert bytes(encode_raw(array.T)) == array.T.tobytes()


@given(st.binary(max_size=40), st.integers(0, 12))
def test_whatever_the_bytes_a_bytes_tensor_is_read_or_refused(raw, elements):
    try:
        array = decode_raw("x", "BYTES", [elements], raw)
    except ServingError:
        return
    assert bytes(encode_raw(array)) == raw


@pytest.mark.parametrize(
    ("datatype", "shape", "raw", "words"),
    [
        ("INT32", [2], b"1234567", "7 bytes were sent where INT32 of shape [2] takes 8"),
        ("BOOL", [2], b"\0\2", "neither 0 nor 1"),
        ("BYTES", [1], b"\xff\xff\xff\xffab", "says it has 4294967295 bytes, of which 2"),
        ("BYTES", [2**33], b"", "too few for 8589934592"),
        ("BYTES", [1], b"\0\0\0\0x", "1 bytes follow"),
        ("BYTES", [3], b"\4\0\0\0abcd\0\0\0\0", "ends after 2 of 3"),
        ("FP32", [2**40], b"", f"over {MAX_ELEMENTS} elements"),
        ("FP32", [0, 2**62], b"", f"over {MAX_ELEMENTS} elements"),
        ("FP32", [-1], b"", "sizes are integers from 0"),
        ("FP32", [True], b"1234", "sizes are integers from 0"),
        ("FP32", [1] * 17, b"1234", "17 dimensions"),
        ("FP8", [1], b"1", "is not of the V2 protocol"),
    ],
)
def test_what_lies_is_refused_with_the_reason(datatype, shape, raw, words):
    with pytest.raises(ServingError, match="tensor 'x'") as refused:
        decode_raw("x", datatype, shape, raw)
    assert words in str(refused.value)


def test_other_dtypes_have_no_name():
    with pytest.raises(ValueError, match="complex64"):
        datatype_of(np.dtype(np.complex64))
    with pytest.raises(ServingError):
        dtype_of("x", ["FP32"])
    assert count("x", ()) == 1
