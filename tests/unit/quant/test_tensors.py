"""Codes of any width lie in words as the reader finds them."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fornax.models.families.quantized.bits import unpack
from fornax.quant.tensors import pack


@given(
    bits=st.integers(2, 8),
    columns=st.integers(1, 140),
    rows=st.integers(1, 3),
    seed=st.integers(0, 2**32 - 1),
)
def test_packed_codes_are_unpacked(bits: int, columns: int, rows: int, seed: int) -> None:
    half = 2 ** (bits - 1)
    codes = np.random.default_rng(seed).integers(-half, half, (rows, columns)).astype(np.int8)
    words = pack(codes, bits)
    assert words.dtype == np.int32
    assert words.shape == (rows, -(-columns * bits // 32))
    found = unpack(words, bits, columns).astype(np.int16) - half
    np.testing.assert_array_equal(found, codes)
