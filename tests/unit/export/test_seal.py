"""What save refuses, by running what it seals, and what it takes."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fornax import export, kernels
from fornax.config.errors import BundleError
from fornax.export import Spec, Tolerance, buckets

W = np.linspace(-1, 1, 16, dtype=np.float32).reshape(4, 4)
ROW = {"x": Spec(("b", 4), "float32")}
RAGGED = {"x": Spec(("b", "t"), "float32")}
BUCKETS = {"b": [2], "t": [4]}


def seal(path: Path, fn, inputs=None, **options):
    inputs = inputs or ROW
    dims = {d for spec in inputs.values() for d in spec.shape if isinstance(d, str)}
    options.setdefault("buckets", {d: sizes for d, sizes in BUCKETS.items() if d in dims})
    options.setdefault("platforms", ("cpu",))
    return export.save(path / "m", {"f": fn}, {"w": W}, inputs={"f": inputs}, **options)


@pytest.mark.parametrize(
    ("fn", "inputs", "words"),
    [
        (lambda p, x: {"y": x - x.mean(0)}, ROW, "rows of 'f' influence each other.*output 'y'"),
        (lambda p, x: {"y": x, "m": x.sum()}, ROW, "output 'm' .* without dimension 'b' must not"),
        (lambda p, x: {"y": x.mean(1)}, RAGGED, "depends on padding: with 't' .* lengths='n'"),
        (lambda p, x: {"y": jnp.log(x)}, ROW, "output 'y' of 'f' is nan at .* low="),
    ],
)
def test_what_a_server_must_not_have_is_found_by_running_it(tmp_path, fn, inputs, words):
    with pytest.raises(BundleError, match=words):
        seal(tmp_path, fn, inputs)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("fn", "inputs", "words"),
    [
        (lambda p, x: {"y": x.T}, ROW, r"shape \(4, b\), so its rows are not"),
        (lambda p, x: x, ROW, "returns a dict of arrays by name"),
        (lambda p, x: {"y": [x]}, ROW, "'y' as a list"),
        (lambda p, x: {"y": x * 1j}, ROW, "dtype complex64; outputs are of"),
        (lambda p, z: {"y": z}, ROW, "with the inputs x, and missing a required argument: 'z'"),
        (
            lambda p, x: (jax.debug.print("x"), {"y": x})[1],
            ROW,
            "calls Python while it runs",
        ),
        (
            lambda p, x: {"y": jax.jit(lambda x: jax.pure_callback(abs, x, x))(x)},
            ROW,
            r"calls Python while it runs \(pure_callback\)",
        ),
        (
            lambda p, x: {"y": x.reshape(x.shape[0], -1, 3).sum(1)},
            RAGGED,
            "decides something by the size of a dimension that is open",
        ),
        (lambda p, x: {"y": x}, {"x": Spec(("b", "t"), "int32", lengths="x")}, "is also an input"),
        (lambda p, x: {"y": x}, {"x": Spec(("b",), "int32", lengths="n")}, "no symbolic dimension"),
    ],
)
def test_what_cannot_be_sealed_is_said_with_what_to_do(tmp_path, fn, inputs, words):
    with pytest.raises(BundleError, match=words):
        seal(tmp_path, fn, inputs)
    assert not list(tmp_path.iterdir())


def test_an_input_without_a_spec_is_named(tmp_path):
    with pytest.raises(BundleError, match="input 'x' of 'f' is a str; describe it with Spec"):
        export.save(tmp_path / "m", {"f": lambda p, x: x}, {}, inputs={"f": {"x": "float32"}})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"buckets": None}, "buckets has no sizes for it"),
        ({"buckets": {"b": [0]}}, "bucket b=0 is not a size"),
        ({"buckets": {"b": [1], "q": [1]}}, "buckets names 'q', a dimension of no input"),
        ({"buckets": [{"q": 1}]}, "has no size for 'b'"),
        ({"exact": ("q",)}, "exact names 'q'"),
        ({"batch": "q"}, "batch='q' does not lead input 'x'"),
        ({"platforms": ("gpu",)}, "is not a sequence of distinct names of cpu, cuda"),
        ({"golden": {"g": {}}}, "golden names 'g', and the functions are f"),
        ({"golden": {"f": {"x": np.ones((2, 4))}}}, "has dtype float64; it takes float32"),
        ({"golden": {"f": {"x": np.ones((1, 4), np.float32)}}, "check": False}, "drop one"),
        ({"tolerance": {"z": 1.0}}, "tolerance names 'z', and the outputs are y"),
        ({"metadata": {"at": object()}}, "metadata is not what JSON holds"),
    ],
)
def test_options_that_do_not_fit_are_named(tmp_path, options, words):
    with pytest.raises(BundleError, match=words):
        seal(tmp_path, lambda p, x: {"y": x}, **options)
    assert not list(tmp_path.iterdir())


def test_native_kernels_stay_out_of_bundles(tmp_path):
    """Fornax's own CPU attention is code of this machine; XLA's is in the graph."""

    def attend(implementation):
        def fn(params, x):
            q = jnp.broadcast_to(x[:, None, None, :], (x.shape[0], 8, 2, 4))
            out = kernels.attention(q, q, q, scale=1.0, implementation=implementation)
            return {"y": out}

        return fn

    with pytest.raises(BundleError, match=r"calls fornax_\w+ on cpu.*implementation='xla'"):
        seal(tmp_path, attend("native"))
    seal(tmp_path, attend("xla"))


def test_results_that_need_their_exact_size_may_say_so(tmp_path):
    seal(tmp_path, lambda p, x: {"y": x.mean(1)}, RAGGED, exact=("t",))
    mean = export.load(tmp_path / "m")["f"]
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    np.testing.assert_array_equal(mean(x=x)["y"], x.mean(1))
    with pytest.raises(BundleError, match="asked for t=3; it takes t of exactly 4"):
        mean(x=x[:, :3])


def test_before_and_after_are_sealed_with_the_function(tmp_path):
    """Scaling of bytes and naming the best, as a client must not know of either."""
    seal(
        tmp_path,
        lambda p, pixels: {"logits": pixels @ p["w"]},
        {"image": Spec(("b", 4), "uint8", high=256)},
        preprocess=lambda image: {"pixels": image.astype(jnp.float32) / 255},
        postprocess=lambda logits: {"best": jnp.argmax(logits, 1), "logits": logits},
    )
    image = np.arange(8, dtype=np.uint8).reshape(2, 4) * 30
    found = export.load(tmp_path / "m")["f"](image=image)
    expected = (image / np.float32(255)) @ W
    np.testing.assert_allclose(found["logits"], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(found["best"], expected.argmax(1))


def test_learned_positions_are_cut_to_an_open_length(tmp_path):
    """`table[:t]` is traced once the largest bucket is known to fit the table."""
    found = seal(tmp_path, lambda p, x: {"y": x + p["w"].ravel()[: x.shape[1]]}, RAGGED)
    assert found.functions["f"].signature.outputs["y"].shape == ("b", "t")


def test_without_a_batch_a_request_is_run_alone(tmp_path):
    seal(tmp_path, lambda p, x: {"y": x - x.mean(0)}, batch=None, exact=("b",))
    f = export.load(tmp_path / "m")["f"]
    assert f.signature.batch is None
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    np.testing.assert_array_equal(f(x=x)["y"], x - x.mean(0))


def test_golden_inputs_and_tolerance_are_the_users(tmp_path):
    x = np.ones((1, 4), np.float32)
    tolerance = {"y": Tolerance(relative=0.5, absolute=0.25)}
    found = seal(
        tmp_path, lambda p, x: {"y": x @ p["w"]}, golden={"f": {"x": x}}, tolerance=tolerance
    )
    assert found.functions["f"].tolerance == tolerance == found.functions["f"].elsewhere
    assert found.functions["f"].golden.rows == 1
    bundle = export.open_bundle(tmp_path / "m")
    weights = bundle.load_weights()
    near = export.Weights({"w": weights.params["w"] * 1.1})
    assert not bundle.check_golden("f", near).exact
    far = export.Weights({"w": weights.params["w"] * 3})
    with pytest.raises(BundleError, match="numerically off"):
        bundle.check_golden("f", far)


def test_a_bundle_replaces_another_only_if_told_to_and_nothing_else(tmp_path):
    def fn(p, x):
        return {"y": x + 1}

    seal(tmp_path, fn, check=False)
    with pytest.raises(BundleError, match="exists; choose another directory or pass overwrite"):
        seal(tmp_path, fn, check=False)
    seal(tmp_path, fn, check=False, overwrite=True, metadata={"second": True})
    manifest = json.loads((tmp_path / "m/manifest.json").read_text())
    assert manifest["metadata"] == {"second": True}
    assert [p.name for p in tmp_path.iterdir()] == ["m"]
    (tmp_path / "m/manifest.json").unlink()
    with pytest.raises(BundleError, match="is not a bundle, so it is not overwritten"):
        seal(tmp_path, fn, check=False, overwrite=True)


def test_where_names_cannot_be_exchanged_a_bundle_is_replaced_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr("fornax.config.files._exchange", lambda a, b: False)
    for number in (1, 2):
        found = {"number": number}
        seal(tmp_path, lambda p, x: {"y": x}, check=False, overwrite=True, metadata=found)
    assert export.open_bundle(tmp_path / "m").manifest.metadata == {"number": 2}
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(BundleError, match="file/m cannot be written"):
        seal(tmp_path / "file", lambda p, x: {"y": x}, check=False)


def test_an_unchecked_bundle_has_no_golden_outputs_and_loads(tmp_path):
    seal(tmp_path, lambda p, x: {"y": x}, check=False)
    loaded = export.load(tmp_path / "m")
    assert loaded.bundle.golden("f") is None
    assert loaded.bundle.check_golden("f", loaded.weights) is None


def test_buckets_may_be_listed_one_by_one(tmp_path):
    listed = [{"b": 1, "t": 8}, {"b": 4, "t": 4}]
    seal(tmp_path, lambda p, x: {"y": x}, RAGGED, buckets=listed, check=False)
    signature = export.open_bundle(tmp_path / "m").signature("f")
    assert signature.shapes == tuple(listed)
    assert buckets.choose(signature, 3, {"t": 3}) == {"b": 4, "t": 4}
    with pytest.raises(BundleError, match="which no bucket holds"):
        buckets.choose(signature, 3, {"t": 8})


@pytest.mark.parametrize(
    ("dtype", "options", "words"),
    [
        ("uint8", {"pad": -1}, "pad=-1 is none of uint8's numbers, 0 to 255"),
        ("int8", {"high": 129}, "high=129 is none of int8's"),
        ("int32", {"low": 0.5}, "low=0.5 is none of int32's"),
        ("float32", {"low": 2, "high": 2}, "low=2 is not below high=2"),
        ("bytes", {"pad": 32}, "pad=32 means nothing for bytes"),
        ("string", {}, "dtype 'string' is none of bool, int8"),
        ("float32", {"axes": ("batch",)}, "has not one entry for each"),
    ],
)
def test_a_spec_says_what_it_cannot_be(dtype, options, words):
    with pytest.raises(BundleError, match=words):
        Spec(("b", "t"), dtype, **options)


def test_padding_may_be_infinite_and_the_manifest_stays_json(tmp_path):
    inputs = {"x": Spec(("b", "t"), "float32", pad=-np.inf, low=-np.inf, high=1.0)}
    seal(tmp_path, lambda p, x: {"y": x.max(1)}, inputs, check=False)
    text = (tmp_path / "m/manifest.json").read_text()
    assert "Infinity" not in text
    largest = export.load(tmp_path / "m")["f"]
    assert largest(x=[[-3.0, -2.0]])["y"].tolist() == [-2.0]


def test_tolerance_goes_by_the_coarsest_numbers_on_the_way(tmp_path):
    """Logits in float32 of weights in bfloat16 are no more exact than these."""
    steps = {}
    for name in ("float32", "bfloat16"):
        weight = {"w": jnp.asarray(W, name)}
        found = export.save(
            tmp_path / name,
            {"f": lambda p, x: {"y": x @ p["w"].astype(jnp.float32)}},
            weight,
            inputs={"f": ROW},
            buckets={"b": [1]},
            platforms=("cpu",),
        )
        steps[name] = found.functions["f"].tolerance["y"].relative
        assert found.functions["f"].elsewhere["y"].relative > 0.01
    assert steps["float32"] < 2e-4 < 0.02 < steps["bfloat16"]
