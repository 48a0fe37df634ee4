"""Inspecting a bundle tells all of it; comparing two tells what differs and nothing else."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from fornax import export
from fornax.config.errors import BundleError
from fornax.export import Spec, compare, inspect


@pytest.fixture(scope="module")
def described(sealed):
    return inspect.describe(sealed)


def test_the_description_is_json_and_has_every_part(described, loaded):
    again = json.loads(json.dumps(described))
    assert again["functions"]["predict"]["buckets"] == {"b": [1, 4], "t": [4, 8]}
    assert again["functions"]["predict"]["ragged"] == ["t"]
    program = again["functions"]["predict"]["programs"]["cpu"]
    assert program["counts"]["tanh"] == 1
    assert program["operations"] == sum(program["counts"].values())
    assert again["weights"]["embed/table"]["bytes"] == 11 * 4 * 4
    manifest = loaded.bundle.manifest
    assert set(again["files"]) == set(manifest.files)
    assert again["bytes"] == sum(file.size for file in manifest.files.values())


def test_the_lines_tell_names_sizes_hashes_and_versions(described, loaded):
    text = "\n".join(inspect.lines(described))
    assert "function predict (the default)" in text
    assert "input   ids: int32 [b, t], true sizes in lengths" in text
    assert "batch   b in buckets of 1, 4" in text
    assert "compiled for 4 combinations of sizes" in text
    assert "graph   cpu, cuda, tpu:" in text
    assert "embed/table  float32 [11, 4]" in text
    assert "note: tiny" in text
    for name, file in loaded.bundle.manifest.files.items():
        assert name in text
        assert file.sha256 in text


def other(path, scale, *, dtype="bytes", **options):
    """The function `letters` once more, changed."""

    def letters(params, text, lengths):
        own_BN = jnp.arange(text.shape[1]) < lengths[:, None]
        return {"count": jnp.sum(own_BN & (text == params["letter"]), axis=1) * scale}

    return export.save(
        path,
        {"letters": letters},
        {"letter": np.uint8(ord("a") if scale < 3 else ord("b"))},
        inputs={"letters": {"text": Spec(("b", "n"), dtype, lengths="lengths")}},
        buckets={"b": [1, 4], "n": [6]},
        check=False,
        **options,
    )


def test_a_bundle_equals_itself(sealed):
    found = compare.compare(sealed, sealed)
    assert found.same
    assert not found.notes
    assert list(compare.lines(found))[:3] == [
        *("signatures are the same", "weights are the same", "graphs are the same"),
    ]


def test_what_differs_is_named(sealed, tmp_path):
    other(tmp_path / "other", 3, platforms=("cpu",))
    found = compare.compare(sealed, tmp_path / "other")
    assert not found.same
    assert found.signatures == [
        *("platform cuda is in a only", "platform tpu is in a only"),
        *("function predict is in a only", "the default function is predict in a, letters in b"),
    ]
    assert found.graphs["letters.cpu"]["operations"]["multiply"] == [1, 2]
    assert any("stablehlo.multiply" in line for line in found.graphs["letters.cpu"]["changes"])
    assert "letter: values differ by 1 at most, of 97" in found.weights
    assert not found.outputs["letters.count"]["equal"]
    text = "\n".join(compare.lines(found))
    assert "multiply: 1 -> 2" in text
    assert "output letters.count differs by" in text


def test_bundles_without_golden_inputs_are_compared_as_far_as_they_can(tmp_path):
    for name in ("a", "b"):
        other(tmp_path / name, 1, platforms=("cpu",))
    found = compare.compare(tmp_path / "a", tmp_path / "b")
    assert found.same
    assert found.notes == ["letters: neither bundle has golden inputs, so no outputs were compared"]


def test_a_damaged_bundle_is_not_described(sealed, tmp_path):
    (tmp_path / "manifest.json").write_bytes((sealed / "manifest.json").read_bytes())
    with pytest.raises(BundleError, match="is missing"):
        inspect.describe(tmp_path)
