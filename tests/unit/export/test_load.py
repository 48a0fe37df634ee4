"""Loaded functions: equal to what they were made of, for requests of any size."""

import gc
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.unit.export.conftest import PARAMS, VOCABULARY

from fornax import export
from fornax.config.errors import BundleError
from fornax.export import Spec, buckets


def request(rows: int, length: int, seed: int = 0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {
        "ids": random.integers(0, VOCABULARY, (rows, length)).astype(np.int32),
        "weight": random.standard_normal(rows).astype(np.float32),
    }


def test_outputs_equal_the_functions_bit_for_bit_at_the_same_bucket(loaded, original):
    given = request(4, 8)
    found = loaded["predict"](**given)
    expected = original(PARAMS, **given, lengths=np.full(4, 8, np.int32))
    for name in ("score", "twice"):
        assert found[name].tobytes() == np.asarray(expected[name]).tobytes()


@pytest.mark.parametrize(("rows", "length"), [(1, 1), (2, 3), (3, 5), (4, 8), (1, 4)])
def test_any_size_is_padded_to_a_bucket_and_unpadded(loaded, rows, length):
    given = request(rows, length, seed=rows)
    found = loaded["predict"](**given)
    table = PARAMS["embed"]["table"]
    expected = np.tanh(table[given["ids"]].mean(1) @ PARAMS["out"]) * given["weight"]
    np.testing.assert_allclose(found["score"], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(found["twice"], np.repeat(given["ids"], 2, axis=1))


def test_more_rows_than_the_largest_bucket_run_in_parts(loaded):
    given = request(11, 6)
    whole = loaded["predict"](**given)
    assert whole["twice"].shape == (11, 12)
    for start, stop in ((0, 4), (4, 8), (8, 11)):
        part = loaded["predict"](**{k: v[start:stop] for k, v in given.items()})
        np.testing.assert_array_equal(whole["score"][start:stop], part["score"])


@pytest.mark.slow
def test_a_bundle_that_is_let_go_leaves_no_lowered_module(sealed):
    def contexts() -> int:
        gc.collect()
        return sum(type(each).__name__ == "JaxIrContext" for each in gc.get_objects())

    def load() -> None:
        export.load(sealed)["predict"](**request(4, 8))

    load()
    before = contexts()
    for _ in range(6):
        load()
    # One that stays from each load is a leak; jax's own caches may fill by one meanwhile.
    assert contexts() < before + 6


def test_a_loaded_function_has_no_gradient(sealed):
    exported = export.open_bundle(sealed).exported("predict", "cpu")
    assert not exported.has_vjp()


def test_strings_become_rows_of_bytes_with_their_own_lengths(loaded):
    found = loaded["letters"](text=[b"banana", b"", b"a\0a", b"xyz", b"aaaaaa"])
    np.testing.assert_array_equal(found["count"], [3, 0, 2, 0, 6])


def test_outputs_as_long_as_the_strings_are_joined_from_parts(tmp_path):
    export.save(
        tmp_path / "upper",
        {"upper": lambda params, text: {"text": text - 32 * (text > 96)}},
        {},
        inputs={"upper": {"text": Spec(("b", "n"), "bytes")}},
        buckets={"b": [2], "n": [4, 8]},
        platforms=["cpu"],
    )
    upper = export.load(tmp_path / "upper")["upper"]
    found = upper(text=[b"a", b"bc", b"defghi", b"", b"j"])["text"]
    assert [row.tobytes().rstrip(b"\0") for row in found] == [b"A", b"BC", b"DEFGHI", b"", b"J"]
    assert found.shape == (5, 6)


def test_lists_and_jax_arrays_are_taken(loaded):
    found = loaded["predict"](ids=[[1, 2], [3, 4]], weight=jnp.ones(2))
    assert found["twice"].tolist() == [[1, 1, 2, 2], [3, 3, 4, 4]]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ids": np.zeros((1, 3), np.int64)}, "dtype int64; it takes int32"),
        ({"ids": np.zeros((1, 3, 1), np.int32)}, r"shape \(1, 3, 1\); it takes \(b, t\)"),
        ({"ids": np.zeros((2, 3), np.int32)}, "b=1 and another input b=2"),
        ({"ids": np.zeros((1, 9), np.int32)}, "t=9; the largest bucket is 8"),
        ({"ids": [[1.5]]}, "dtype float64; it takes int32"),
        ({"ids": [[2**40]]}, "dtype int64; it takes int32"),
        ({"other": np.zeros(1)}, "unknown other; its inputs are ids, weight"),
        ({"lengths": np.ones(1, np.int32)}, "unknown lengths"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(loaded, change, words):
    with pytest.raises(BundleError, match=words):
        loaded["predict"](**(request(1, 3) | change))


def test_a_missing_input_and_an_unknown_function_are_named(loaded):
    with pytest.raises(BundleError, match="lacks weight"):
        loaded["predict"](ids=np.zeros((1, 1), np.int32))
    with pytest.raises(BundleError, match="no function 'rank'; it has predict, letters"):
        loaded["rank"]


def test_what_no_function_uses_is_not_sealed(loaded):
    assert set(loaded.bundle.manifest.weights) == {"embed/table", "out", "letter"}
    assert loaded.bundle.manifest.functions["letters"].weights == ("letter",)


def test_a_program_takes_exactly_its_bucket(loaded):
    program = loaded["predict"].program({"b": 4, "t": 8})
    given = buckets.assemble(program.signature, program.dims, [request(4, 8)])
    outputs = program(given)
    assert all(isinstance(value, jax.Array) for value in outputs.values())
    assert outputs["twice"].shape == (4, 16)
    assert program.memory.arguments >= sum(w.nbytes for w in program._weights)
    with pytest.raises(BundleError, match="input 'ids' of 'predict' is int32"):
        program(given | {"ids": given["ids"][:2]})
    with pytest.raises(BundleError, match="lacks input 'lengths'"):
        program({k: v for k, v in given.items() if k != "lengths"})


def test_an_array_that_is_a_view_with_strides_is_taken_as_it_reads(loaded):
    given = request(4, 8)
    turned = np.asfortranarray(given["ids"])
    np.testing.assert_array_equal(
        loaded["predict"](**given | {"ids": turned})["twice"], loaded["predict"](**given)["twice"]
    )


def test_the_golden_run_is_exact_here_and_its_report_says_so(sealed, loaded):
    bundle = loaded.bundle
    report = bundle.check_golden("predict", loaded.weights)
    assert report is not None
    assert report.exact
    assert set(report.worst) == {"score", "twice"}


def test_weights_that_compute_other_numbers_are_refused(loaded):
    altered = dict(loaded.weights.params)
    altered["out"] = altered["out"] * 1.01
    with pytest.raises(BundleError, match=r"numerically off .* output 'score' has .* off by"):
        loaded.bundle.check_golden("predict", export.Weights(altered))
    altered["letter"] = jnp.uint8(ord("b"))
    with pytest.raises(BundleError, match="output 'count' has"):
        loaded.bundle.check_golden("letters", export.Weights(altered))


@pytest.mark.slow
def test_a_bundle_needs_jax_and_none_of_the_code_that_makes_models(sealed):
    """Signatures and buckets do not even need jax; loading needs no flax, orbax, qwix or zoo."""
    script = f"""
import sys
import fornax.export, fornax.export.buckets
assert "jax" not in sys.modules and "tensorstore" not in sys.modules
predict = fornax.export.load({str(sealed)!r})["predict"]
assert predict(ids=[[1, 2]], weight=[1.0])["twice"].tolist() == [[1, 1, 2, 2]]
made = ("flax", "orbax", "qwix", "optax", "grain", "fornax.models", "fornax.adapters", "torch")
assert not [name for name in made if name in sys.modules]
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
