"""Weights come out of safetensors files by a map, and nothing is left behind unsaid."""

import json

import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from fornax.config.errors import BundleError
from fornax.export.safetensors_map import Tensor, read_safetensors


@pytest.fixture(scope="module")
def theirs() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "embed.weight": rng.normal(size=(5, 4)).astype(np.float32),
        "layer.0.q.weight": rng.normal(size=(6, 4)).astype(np.float32),
        "layer.1.q.weight": rng.normal(size=(6, 4)).astype(np.float32),
        "pooler.weight": np.ones(3, np.float16),
    }


@pytest.fixture(scope="module")
def file(theirs, tmp_path_factory):
    path = tmp_path_factory.mktemp("theirs") / "model.safetensors"
    save_file(theirs, path)
    return path


MAP = {
    "table": "embed.weight",
    "layers/q": Tensor("layer.{}.q.weight", transpose=True, reshape=(4, 2, 3), stack=2),
}


def test_tensors_are_turned_shaped_and_stacked(file, theirs):
    params = read_safetensors(file, MAP, ignore=("pooler.*",))
    np.testing.assert_array_equal(params["table"], theirs["embed.weight"])
    q = [theirs[f"layer.{index}.q.weight"].T.reshape(4, 2, 3) for index in range(2)]
    np.testing.assert_array_equal(params["layers"]["q"], np.stack(q))


def test_a_module_is_filled_and_keeps_its_dtypes(file, theirs):
    linear = nnx.eval_shape(lambda: nnx.Linear(4, 6, use_bias=False, rngs=nnx.Rngs(0)))
    filled = read_safetensors(
        file, {"kernel": Tensor("layer.0.q.weight", transpose=True)}, like=linear, ignore=("*",)
    )
    x = np.ones((1, 4), np.float32)
    expected = x @ theirs["layer.0.q.weight"].T
    np.testing.assert_allclose(filled(x), expected, rtol=1e-6)


def test_bfloat16_and_dtypes_asked_for(tmp_path):
    data = np.arange(4).astype(ml_dtypes.bfloat16)
    header = json.dumps({"w": {"dtype": "BF16", "shape": [4], "data_offsets": [0, 8]}}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + data.tobytes())
    assert read_safetensors(tmp_path, {"w": "w"})["w"].dtype == ml_dtypes.bfloat16
    wide = read_safetensors(tmp_path, {"w": Tensor("w", dtype="float32")})["w"]
    np.testing.assert_array_equal(wide, np.arange(4, dtype=np.float32))


@pytest.mark.parametrize(
    ("names", "options", "reason"),
    [
        (MAP, {}, "1 tensors that the map does not name, such as pooler.weight"),
        ({"w": "lost"}, {"ignore": ("*",)}, "tensor 'lost', which the file does not have"),
        ({"w": Tensor("embed.weight", reshape=(3, 3))}, {"ignore": ("*",)}, "cannot be turned"),
        ({"w": "embed.weight", "w/v": "embed.weight"}, {"ignore": ("*",)}, "lies below 'w'"),
        ({"w": "embed.weight"}, {"ignore": ("*",), "like": {"v": np.ones(1)}}, "does not fill v"),
        ({"w": "embed.weight"}, {"ignore": ("*",), "like": {"w": np.ones(1)}}, r"\(1,\) is needed"),
    ],
)
def test_what_does_not_fit_is_refused(file, names, options, reason):
    with pytest.raises(BundleError, match=reason):
        read_safetensors(file, names, **options)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 20,
        (10).to_bytes(8, "little") + b"[1, 2, 3] ",
        (60).to_bytes(8, "little")
        + b'{"w":{"dtype":"F32","shape":[9],"data_offsets":[0,36]}}'.ljust(60),
    ],
)
def test_a_damaged_file_is_refused(tmp_path, content):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(BundleError, match="not a readable safetensors file"):
        read_safetensors(path, {"w": "w"})


def test_an_index_reaches_no_other_folder(tmp_path):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": "../model.safetensors"}}))
    with pytest.raises(BundleError, match="only files in its own folder"):
        read_safetensors(tmp_path, {"w": "w"})
