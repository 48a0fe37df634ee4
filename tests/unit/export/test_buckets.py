"""Requests to buckets and back: whatever the sizes, each request gets its own rows, unpadded."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fornax.config.errors import BundleError
from fornax.export import Signature, TensorSpec, buckets, expressions

SIGNATURE = Signature(
    name="f",
    inputs={
        "ids": TensorSpec(name="ids", shape=("b", "t"), dtype="int32", pad=-1, lengths="n"),
        "text": TensorSpec(name="text", shape=("b", 2, "m"), dtype="bytes", lengths="bytes_n"),
    },
    outputs={
        "twice": TensorSpec(name="twice", shape=("b", "2*t"), dtype="int32"),
        "shared": TensorSpec(name="shared", shape=(3,), dtype="int32"),
    },
    batch="b",
    exact=(),
    shapes=tuple({"b": b, "t": t, "m": m} for b in (2, 8) for t in (4, 16) for m in (8,)),
)
WORDS = st.binary(max_size=8)


@st.composite
def some_requests(draw):
    found = []
    for _ in range(draw(st.integers(1, 4))):
        rows, length = draw(st.integers(1, 2)), draw(st.integers(0, 16))
        ids = np.asarray(
            draw(st.lists(st.integers(0, 99), min_size=rows * length, max_size=rows * length)),
            np.int32,
        )
        text = np.empty((rows, 2), object)
        for index in np.ndindex(rows, 2):
            text[index] = draw(WORDS)
        found.append({"ids": ids.reshape(rows, length), "text": text})
    return found


@settings(max_examples=60, database=None)
@given(some_requests())
def test_every_request_gets_its_own_rows_without_padding(requests):
    dims = [buckets.measure(SIGNATURE, r) for r in requests]
    rows = sum(d["b"] for d in dims)
    sizes = {name: max(d[name] for d in dims) for name in ("t", "m")}
    chosen = buckets.choose(SIGNATURE, rows, sizes)
    inputs = buckets.assemble(SIGNATURE, chosen, requests)
    assert {n: a.shape for n, a in inputs.items()} == {
        s.name: s.sizes(chosen) for s in SIGNATURE.arguments
    }
    start = 0
    for request, own in zip(requests, dims, strict=True):
        here = slice(start, start + own["b"])
        np.testing.assert_array_equal(inputs["ids"][here, : own["t"]], request["ids"])
        assert (inputs["ids"][here, own["t"] :] == -1).all()
        assert (inputs["n"][here] == own["t"]).all()
        for (row, column), item in np.ndenumerate(request["text"]):
            stored = inputs["text"][start + row, column]
            assert stored.tobytes() == item.ljust(len(stored), b"\0")
        longest = [max(map(len, row)) for row in request["text"]]
        assert inputs["bytes_n"][here].tolist() == longest
        start += own["b"]
    assert (inputs["ids"][start:] == -1).all()
    assert (inputs["n"][start:] == 0).all()
    outputs = {"twice": np.repeat(inputs["ids"], 2, axis=1), "shared": np.arange(3)}
    for request, share in zip(
        requests, buckets.take(SIGNATURE, chosen, outputs, requests), strict=True
    ):
        np.testing.assert_array_equal(share["twice"], np.repeat(request["ids"], 2, axis=1))
        np.testing.assert_array_equal(share["shared"], [0, 1, 2])


def test_the_cheapest_bucket_that_holds_a_request_is_chosen():
    assert buckets.choose(SIGNATURE, 2, {"t": 4, "m": 1}) == {"b": 2, "t": 4, "m": 8}
    assert buckets.choose(SIGNATURE, 3, {"t": 4, "m": 1}) == {"b": 8, "t": 4, "m": 8}
    assert buckets.choose(SIGNATURE, 1, {"t": 5, "m": 0}) == {"b": 2, "t": 16, "m": 8}
    with pytest.raises(BundleError, match="m=9; the largest bucket is 8"):
        buckets.choose(SIGNATURE, 1, {"t": 1, "m": 9})


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("t", 6),
        ("2*t + 1", 13),
        ("t - b", 4),
        ("floordiv(t, 4)", 1),
        ("mod(t, 4)", 2),
        ("max(b, t)", 6),
        ("min(t, 128)", 6),
        ("-b + t", 4),
        ("b*t", 12),
        ("t**2", 36),
    ],
)
def test_sizes_are_computed_as_jax_writes_them(text, value):
    assert expressions.evaluate(text, {"t": 6, "b": 2}) == value


@given(st.text(max_size=30))
@settings(max_examples=100, database=None)
def test_any_text_is_a_size_or_refused(text):
    try:
        assert isinstance(expressions.evaluate(text, {"t": 6, "b": 2}), int)
    except BundleError:
        return


@pytest.mark.parametrize(
    "text",
    ["__import__('os')", "t.real", "t if t else b", "2**t", "[t]", "f(t, b)", "'t'", "1.5", "t^2"],
)
def test_nothing_but_arithmetic_is_a_size(text):
    with pytest.raises(BundleError, match="is not a size"):
        expressions.evaluate(text, {"t": 6, "b": 2})
