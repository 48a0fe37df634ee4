"""Shapes: bytes with the padding of tiles, memory spaces, tuples."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fornax.hlo import shapes
from fornax.hlo.shapes import parse_shape


@pytest.mark.parametrize(
    ("text", "padded", "unpadded"),
    [
        ("f32[]", 4, 4),
        ("f32[]{:T(128)}", 512, 4),
        ("bf16[32,32,4096]{2,1,0:T(8,128)(2,1)}", 8388608, 8388608),
        ("f32[4096,1]{1,0:T(8,128)}", 4096 * 128 * 4, 4096 * 4),
        ("f32[4096,1]{0,1:T(1,128)}", 4096 * 4, 4096 * 4),
        ("bf16[3,130]{1,0:T(8,128)(2,1)}", 8 * 256 * 2, 3 * 130 * 2),
        ("s4[3,5]{1,0}", 8, 8),
        ("s4[16,128]{1,0:T(8,128)E(4)}", 1024, 1024),
        ("pred[5]{0:T(1024)}", 1024, 5),
        ("f8e4m3fn[10]", 10, 10),
        ("token[]", 0, 0),
        ("(f32[2]{0}, /*index=1*/(s32[], bf16[3,4]{1,0}))", 8 + 4 + 24, 36),
        ("()", 0, 0),
    ],
)
def test_bytes_count_the_padding_of_tiles(text: str, padded: int, unpadded: int) -> None:
    shape = parse_shape(text)
    assert (shape.bytes, shape.unpadded_bytes) == (padded, unpadded)


def test_the_layout_decides_which_dimension_is_padded() -> None:
    rows = parse_shape("f32[100,8]{1,0:T(8,128)}")
    columns = parse_shape("f32[100,8]{0,1:T(8,128)}")
    assert rows.bytes == 104 * 128 * 4
    assert columns.bytes == 8 * 128 * 4


def test_memory_spaces_are_told_apart() -> None:
    shape = parse_shape("(f32[8,128]{1,0:T(8,128)S(1)}, f32[2]{0:S(5)}, u32[]{:S(2)}, f32[3])")
    assert [leaf.space for leaf in shapes.leaves(shape)] == [1, 5, 2, 0]
    assert shape.bytes_in(shapes.VMEM) == 4096
    assert shape.bytes_in(shapes.HOST) == 8
    assert shape.bytes_in(shapes.HBM) == 12
    assert shape.at((1,)).dims == (2,)


def test_what_is_not_a_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="not the text of an HLO shape"):
        parse_shape("f32 2 3")
    with pytest.raises(ValueError, match="not a dtype"):
        shapes.dtype_bits("q7")


_dims = st.lists(st.integers(0, 300), max_size=4)


@given(_dims, st.permutations(range(4)), st.sampled_from(["", "T(8,128)", "T(8,128)(2,1)"]))
def test_padded_bytes_are_whole_tiles_that_hold_the_array(
    dims: list[int], order: list[int], tiles: str
) -> None:
    layout = ",".join(str(n) for n in order if n < len(dims))
    shape = parse_shape(f"bf16[{','.join(map(str, dims))}]{{{layout}:{tiles}}}")
    assert shape.unpadded_bytes == 2 * math.prod(dims)
    assert shape.bytes >= shape.unpadded_bytes
    assert str(shape) == f"bf16[{','.join(map(str, dims))}]"
    if tiles:
        assert shape.bytes % (8 * 128 * 2) == 0
