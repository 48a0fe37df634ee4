"""Bundles written under other versions of jax load, and compute what their functions say.

Written by tests/data/bundles/write.py under the oldest, the middle and the newest jax supported.
"""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from fornax import export

BUNDLES = sorted((Path(__file__).parents[2] / "data" / "bundles").glob("jax-*"))


def reference(params, ids, length, weight):
    """`predict` of write.py in numpy, row by row."""
    table, step = params["table"].astype(np.float32), params["step"]
    states = []
    for row, stop in zip(ids, length, strict=True):
        h = np.zeros(4, np.float32)
        for token in row[:stop]:
            h = np.tanh(h @ step + table[token])
        states.append(h)
    h = np.stack(states)
    scaled = h * weight[:, None]
    at = np.argsort(-scaled, axis=1, kind="stable")[:, :2].astype(np.int32)
    best = np.take_along_axis(scaled, at, axis=1)
    return {"score": 1 / (1 + np.exp(-h.sum(axis=1))), "best": best, "at": at}


def test_there_is_a_bundle_of_each_minor_version():
    assert {path.name.rsplit(".", 1)[0] for path in BUNDLES} >= {"jax-0.10", "jax-0.12.0"}


@pytest.mark.parametrize("path", BUNDLES, ids=lambda path: path.name)
def test_a_bundle_of_another_jax_computes_what_it_should(path):
    loaded = export.load(path)  # compares with its golden outputs
    rng = np.random.default_rng(1)
    drawn = np.random.default_rng(0)
    params = {
        "table": drawn.normal(size=(11, 4)).astype(ml_dtypes.bfloat16),
        "step": drawn.normal(size=(4, 4)).astype(np.float32),
    }
    ids = rng.integers(0, 11, (3, 5), dtype=np.int32)
    weight = rng.normal(size=3).astype(np.float32)
    found = loaded["predict"](ids=ids, weight=weight)
    expected = reference(params, ids, [5, 5, 5], weight)
    np.testing.assert_array_equal(found.pop("at"), expected.pop("at"))
    for name, array in found.items():
        np.testing.assert_allclose(array, expected[name], rtol=2e-5, atol=1e-6, err_msg=name)
    counted = loaded["count"](text=[b"banana", b""], stop=np.array([2**40, -1], np.int64))
    assert counted["count"].tolist() == [3 + 7 + 2**40, 7 - 1]


def test_a_bundle_names_no_place_of_the_machine_that_wrote_it():
    for path in BUNDLES:
        for file in path.rglob("*"):
            content = file.read_bytes() if file.is_file() else b""
            assert b".py" not in content
            assert str(Path.home()).encode() not in content or str(Path.home()) == "/"
