"""Integer columns of a page as text."""

import base64

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fornax.profile.page.columns import packed, packed_differences


def _read(text: str) -> list[int]:
    """LEB128 as DWARF's standard describes it, a byte at a time."""
    values, value, shift = [], 0, 0
    for byte in base64.b64decode(text):
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            values.append(value)
            value = shift = 0
    return values


@given(st.lists(st.integers(0, 2**53)))
def test_integers_come_back(values: list[int]) -> None:
    assert _read(packed(np.array(values, np.int64))) == values


@given(st.lists(st.integers(-(2**52), 2**52)))
def test_differences_come_back(values: list[int]) -> None:
    before, found = 0, []
    for code in _read(packed_differences(np.array(values, np.int64))):
        before += -(code + 1) // 2 if code % 2 else code // 2
        found.append(before)
    assert found == values


def test_a_column_below_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="-1 is below 0"):
        packed(np.array([3, -1]))
