"""Folders of components: what is read beside arrays cut by hand, both directions, wrong folders."""

import json
from dataclasses import asdict, dataclass, replace

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from fornax.checkpoint.safetensors_file import find_tensors
from fornax.config.errors import CheckpointError, ConfigError
from fornax.diffusion.models import files
from fornax.diffusion.models.files import Component
from fornax.diffusion.models.keys import Key
from fornax.diffusion.models.parts import Conv, Dense, Make, RMSNorm
from fornax.mesh import MeshConfig, make_mesh
from fornax.models import stack_layers


@dataclass(frozen=True, kw_only=True)
class Config:
    width: int = 8
    layers: int = 3


class Layer(nnx.Module):
    def __init__(self, config: Config, **make):
        self.q = Dense(config.width, {"heads": 2, "head_dim": 4}, **make)
        self.k = Dense(config.width, {"heads": 2, "head_dim": 4}, **make)
        self.out = Dense({"heads": 2, "head_dim": 4}, {"embed": config.width}, **make)
        self.down = Dense({"mlp": 12}, {"embed": config.width}, bias=False, **make)
        self.modulation = Dense(config.width, {"groups": 2, "mlp": config.width}, **make)
        self.norm = RMSNorm(config.width, eps=1e-6)


class Net(nnx.Module):
    def __init__(self, config: Config, **make):
        self.config = config
        self.patch = Conv(3, config.width, 2, stride=2, padding=0, axes=(None, "embed"), **make)
        self.shift = nnx.Param(jnp.zeros((6, config.width)), axes=(None, "norm"))
        wide = Make(rngs=make["rngs"], dtype=make["dtype"], compute_dtype=make["compute_dtype"])
        self.layers = stack_layers(
            lambda rngs: Layer(config, **{**wide, "rngs": rngs}), config.layers, make["rngs"]
        )


def keys(config: Config) -> list[Key]:
    every = range(config.layers)
    return [
        Key("patch", "embed.proj"),
        Key("shift", "table", leading=1),
        Key("layers/q", "blocks.{}.qk", layers=every),
        Key("layers/k", "blocks.{}.qk", layers=every),
        Key("layers/out", "blocks.{}.out", layers=every, axis=1),
        Key("layers/down", "blocks.{}.out", layers=every, axis=1),
        Key("layers/modulation", "blocks.{}.ada.linear", layers=every, order=(1, 0)),
        Key("layers/norm", "blocks.{}.norm", layers=every),
    ]


NET = Component(
    class_name="Net",
    read=lambda fields: Config(width=fields.take("width", 8), layers=fields.need("layers")),
    write=asdict,
    make=Net,
    keys=keys,
)


@pytest.fixture
def stored():
    rng = np.random.default_rng(0)
    shapes = {"embed.proj.weight": (8, 3, 2, 2), "embed.proj.bias": (8,), "table": (1, 6, 8)}
    for layer in range(3):
        shapes |= {
            f"blocks.{layer}.qk.weight": (16, 8),
            f"blocks.{layer}.qk.bias": (16,),
            f"blocks.{layer}.out.weight": (8, 20),
            f"blocks.{layer}.out.bias": (8,),
            f"blocks.{layer}.ada.linear.weight": (16, 8),
            f"blocks.{layer}.ada.linear.bias": (16,),
            f"blocks.{layer}.norm.weight": (8,),
        }
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


@pytest.fixture
def folder(tmp_path, stored):
    save_file(stored, tmp_path / "diffusion_pytorch_model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"_class_name": "Net", "layers": 3}))
    return tmp_path


def test_tensors_are_read_as_torch_lays_them_out(folder, stored):
    net = files.load(NET, folder)
    x = np.random.default_rng(1).normal(size=(8,)).astype(np.float32)
    for layer in range(3):
        both = stored[f"blocks.{layer}.qk.weight"] @ x + stored[f"blocks.{layer}.qk.bias"]
        q, k = (getattr(net.layers, name) for name in "qk")
        for module, want in ((q, both[:8]), (k, both[8:])):
            kernel, bias = module.kernel[...][layer], module.bias[...][layer]
            found = np.einsum("d,dnh->nh", x, kernel) + bias
            np.testing.assert_allclose(found.ravel(), want, atol=1e-5)
        inner = np.random.default_rng(2).normal(size=20).astype(np.float32)
        out, down = net.layers.out.kernel[...][layer], net.layers.down.kernel[...][layer]
        found = np.einsum("nh,nhd->d", inner[:8].reshape(2, 4), out) + inner[8:] @ down
        np.testing.assert_allclose(found, stored[f"blocks.{layer}.out.weight"] @ inner, atol=1e-5)
        ada = (stored[f"blocks.{layer}.ada.linear.weight"] @ x).reshape(2, 8)[::-1]
        found = np.einsum("d,dgf->gf", x, net.layers.modulation.kernel[...][layer])
        np.testing.assert_allclose(found, ada, atol=1e-5)
    patch = np.random.default_rng(3).normal(size=(1, 2, 2, 3)).astype(np.float32)
    want = np.einsum("nchw,hwc->n", stored["embed.proj.weight"], patch[0])
    found = net.patch(jnp.asarray(patch))[0, 0, 0]
    np.testing.assert_allclose(found, want + stored["embed.proj.bias"], atol=1e-5)


@pytest.mark.parametrize("shard", [10**9, 1000])
def test_a_folder_written_again_has_the_same_bytes(folder, stored, tmp_path, shard):
    target = tmp_path / "again"
    files.save(NET, files.load(NET, folder), target, max_shard_bytes=shard)
    found = {}
    for file in target.glob("*.safetensors"):
        found |= load_file(file)
    assert found.keys() == stored.keys()
    for name, array in stored.items():
        assert found[name].tobytes() == array.tobytes()
        assert found[name].shape == array.shape
    assert json.loads((target / "config.json").read_text())["layers"] == 3
    net = files.load(NET, target)  # sharded files too
    np.testing.assert_array_equal(net.shift[...], stored["table"][0])


def test_each_device_of_a_mesh_has_its_part(folder, stored):
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    net = files.load(NET, folder, mesh=mesh)
    kernel = net.layers.q.kernel[...]
    assert kernel.addressable_shards[0].data.shape == (3, 4, 1, 4)
    one = files.load(NET, folder).layers.q.kernel[...]
    np.testing.assert_array_equal(np.asarray(kernel), np.asarray(one))


def test_dtypes_are_those_asked_for_or_stored(folder):
    assert files.load(NET, folder).patch.kernel[...].dtype == jnp.float32
    net = files.load(NET, folder, dtype=jnp.bfloat16)
    assert net.patch.kernel[...].dtype == jnp.bfloat16
    assert net.patch.compute_dtype == jnp.bfloat16


def test_fresh_parameters_do_not_depend_on_the_mesh():
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    here = files.create(NET, Config(), seed=3)
    there = files.create(NET, Config(), seed=3, mesh=mesh)
    np.testing.assert_array_equal(here.layers.q.kernel[...], there.layers.q.kernel[...])
    assert len(there.layers.q.kernel[...].sharding.device_set) == 8


def test_wrong_folders_are_refused_by_name(folder, stored, tmp_path):
    def config(**values):
        (folder / "config.json").write_text(json.dumps({"_class_name": "Net", **values}))

    config(layers=3, widht=9)
    with pytest.raises(ConfigError, match=r"widht is not known; did you mean width\?"):
        files.load(NET, folder)
    config()
    with pytest.raises(ConfigError, match="has no layers"):
        files.load(NET, folder)
    config(layers=2)
    with pytest.raises(CheckpointError, match=r"holds blocks\.2\.ada\.linear\.bias"):
        files.load(NET, folder)
    config(layers=4)
    with pytest.raises(CheckpointError, match=r"lacks blocks\.3\.ada\.linear\.bias"):
        files.load(NET, folder)
    config(layers=3, width=16)
    with pytest.raises(CheckpointError, match=r"embed\.proj\.weight is \(8, 3, 2, 2\), and"):
        files.load(NET, folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="is not JSON"):
        files.load(NET, folder)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        files.load(NET, folder)


def test_a_folder_that_is_there_is_kept(folder, tmp_path):
    net = files.load(NET, folder)
    with pytest.raises(CheckpointError, match="exists"):
        files.save(NET, net, folder)
    other = tmp_path / "other"
    other.mkdir()
    (other / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        files.save(NET, net, other, overwrite=True)
    files.save(NET, net, folder, overwrite=True)


def test_a_parameter_without_a_line_is_refused(folder, tmp_path):
    net = files.load(NET, folder)
    net.more = nnx.Param(jnp.zeros((2,)), axes=(None,))
    with pytest.raises(ConfigError, match="more has no line"):
        files.save(NET, net, tmp_path / "out")


def test_parts_along_the_inputs_with_a_bias_each_are_refused(folder):
    both = [replace(key, axis=1) for key in keys(Config())]
    with pytest.raises(ConfigError, match="layers/q/bias and layers/k/bias are both blocks"):
        files.load(replace(NET, keys=lambda config: both), folder)


def test_a_folder_that_holds_one_variant_is_read_from_it(tmp_path):
    """As `from_pretrained(variant="fp16")` downloads it, in one file or in shards."""
    stem, half = "diffusion_pytorch_model", {"w": np.ones(3, np.float16)}
    save_file(half, tmp_path / f"{stem}.fp16.safetensors")
    np.testing.assert_array_equal(find_tensors(tmp_path, stem=stem)["w"].view(), half["w"])
    shard = f"{stem}.fp16-00001-of-00001.safetensors"
    (tmp_path / f"{stem}.fp16.safetensors").rename(tmp_path / shard)
    index = tmp_path / f"{stem}.safetensors.index.fp16.json"
    index.write_text(json.dumps({"weight_map": {"w": shard}}))
    np.testing.assert_array_equal(find_tensors(tmp_path, stem=stem)["w"].view(), half["w"])
    save_file(half, tmp_path / f"{stem}.non_ema.safetensors")
    with pytest.raises(CheckpointError, match=r"non_ema\.safetensors and .*fp16\.json"):
        find_tensors(tmp_path, stem=stem)
