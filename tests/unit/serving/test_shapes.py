"""Which bucket a request goes to, without a device."""

import pytest

from fornax.config import BundleError
from fornax.export.spec import Signature, TensorSpec
from fornax.serving.execution.admission import Shapes


def signature(*shapes: dict[str, int], exact: tuple[str, ...] = ()) -> Signature:
    return Signature(
        name="f",
        inputs={
            "ids": TensorSpec(name="ids", shape=("b", "t"), dtype="int32"),
            "image": TensorSpec(name="image", shape=("b", "s"), dtype="float32"),
        },
        outputs={"y": TensorSpec(name="y", shape=("b",), dtype="float32")},
        batch="b",
        exact=exact,
        shapes=shapes,
    )


def test_each_padded_shape_has_the_rows_it_was_compiled_for():
    shapes = Shapes(
        signature({"b": 8, "t": 16, "s": 4}, {"b": 1, "t": 16, "s": 4}, {"b": 2, "t": 64, "s": 4})
    )
    assert shapes.rows == {(16, 4): (1, 8), (64, 4): (2,)}
    assert shapes.place({"b": 5, "t": 3, "s": 4}) == (5, (16, 4))
    assert shapes.place({"b": 5, "t": 17, "s": 1}) == (5, (64, 4))  # split: it runs two rows


def test_a_request_goes_to_the_shape_of_least_elements():
    shapes = Shapes(
        signature({"b": 1, "t": 64, "s": 4}, {"b": 1, "t": 16, "s": 99}, {"b": 1, "t": 16, "s": 4})
    )
    assert shapes.place({"b": 1, "t": 10, "s": 4})[1] == (16, 4)
    assert shapes.place({"b": 1, "t": 10, "s": 5})[1] == (16, 99)


def test_exact_dimensions_are_neither_padded_nor_mixed():
    shapes = Shapes(signature({"b": 1, "t": 8, "s": 4}, {"b": 1, "t": 8, "s": 6}, exact=("s",)))
    assert shapes.place({"b": 1, "t": 2, "s": 6})[1] == (8, 6)
    with pytest.raises(BundleError, match="exactly 4, 6"):
        shapes.place({"b": 1, "t": 2, "s": 5})
    assert not shapes.fits((8, 4), (8, 6))
    assert shapes.fits((4, 6), (8, 6))
    assert not shapes.fits((8, 6), (4, 6))


def test_no_rows_and_too_long_are_refused():
    shapes = Shapes(signature({"b": 1, "t": 8, "s": 4}))
    with pytest.raises(BundleError, match="0 rows"):
        shapes.place({"b": 0, "t": 8, "s": 4})
    with pytest.raises(BundleError, match="largest bucket is 8"):
        shapes.place({"b": 1, "t": 9, "s": 4})
