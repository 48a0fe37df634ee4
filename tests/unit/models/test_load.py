"""Loading a directory: into any sharding and dtype, and damage named before memory is taken."""

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from fornax.config.errors import CheckpointError, ConfigError, ShardingError
from fornax.mesh import DEFAULT_RULES, MeshConfig, make_mesh, tree_shardings
from fornax.models import (
    DecoderConfig,
    ExpertsConfig,
    LatentConfig,
    RopeConfig,
    create_decoder,
    load_pretrained,
    save_pretrained,
)

CONFIG = DecoderConfig(
    vocab_size=24,
    hidden_size=16,
    intermediate_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    initializer_range=0.5,
)
Q = "model.layers.1.self_attn.q_proj.weight"


@functools.cache
def model() -> Any:
    return create_decoder(CONFIG, seed=1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_pretrained(model(), tmp_path / "m")
    return tmp_path / "m"


def assert_same(found: Any, wanted: Any) -> None:
    for a, b in zip(
        jax.tree.leaves(nnx.state(found)), jax.tree.leaves(nnx.state(wanted)), strict=True
    ):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def rewrite(folder: Path, change: Callable[[dict[str, np.ndarray]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def configure(folder: Path, **keys: Any) -> None:
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, **keys}))


def test_what_was_saved_is_loaded(folder: Path) -> None:
    again = load_pretrained(folder)
    assert_same(again, model())
    assert again.config.family == "llama"


@pytest.mark.parametrize("sizes", [{"fsdp": 8}, {"data": 2, "fsdp": 2, "tensor": 2}], ids=str)
def test_each_device_holds_its_own_part(folder: Path, sizes: dict[str, int]) -> None:
    mesh = make_mesh(MeshConfig(**{"fsdp": 1, **sizes}))
    loaded = load_pretrained(folder, mesh=mesh)
    assert_same(loaded, model())
    state = nnx.state(loaded)
    wanted = tree_shardings(state, mesh, DEFAULT_RULES)
    for leaf, place in zip(jax.tree.leaves(state), jax.tree.leaves(wanted), strict=True):
        assert leaf.sharding.is_equivalent_to(place, leaf.ndim)
        assert {shard.data.shape for shard in leaf.addressable_shards} == {
            place.shard_shape(leaf.shape)
        }
    q = loaded.layers.attention.q.kernel.get_value()
    parts = sizes["fsdp"] * sizes.get("tensor", 1)
    assert q.addressable_shards[0].data.nbytes * parts == q.nbytes


def test_heads_that_do_not_divide_are_refused(folder: Path) -> None:
    with pytest.raises(ShardingError, match=r"layers/attention/k/kernel: .*\(kv_heads\) of size 2"):
        load_pretrained(folder, mesh=make_mesh(MeshConfig(fsdp=2, tensor=4)))


def test_dtype_is_chosen(folder: Path) -> None:
    half = load_pretrained(folder, dtype="bfloat16")
    for a, b in zip(
        jax.tree.leaves(nnx.state(half)), jax.tree.leaves(nnx.state(model())), strict=True
    ):
        assert a.dtype == jnp.bfloat16
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b).astype(jnp.bfloat16))
    assert half.compute_dtype == jnp.bfloat16
    mixed = load_pretrained(folder, dtype="float32", compute_dtype="bfloat16")
    assert (mixed.embed.embedding.dtype, mixed.compute_dtype) == (jnp.float32, jnp.bfloat16)


def test_bfloat16_files_are_read_as_they_are(folder: Path, tmp_path: Path) -> None:
    half = load_pretrained(folder, dtype="bfloat16")
    save_pretrained(half, tmp_path / "half")
    assert_same(load_pretrained(tmp_path / "half"), half)
    whole = load_pretrained(tmp_path / "half", dtype="float32")
    assert whole.embed.embedding.dtype == jnp.float32


@pytest.mark.parametrize("dtype", ["float16", "int8", "float12"])
def test_a_dtype_that_cannot_hold_a_model_is_refused(folder: Path, dtype: str) -> None:
    with pytest.raises(ConfigError, match=f"{dtype}.*float32.*bfloat16"):
        load_pretrained(folder, dtype=dtype)


def test_half_precision_files_need_a_choice(folder: Path) -> None:
    def halve(tensors: dict[str, np.ndarray]) -> None:
        tensors.update({name: t.astype(np.float16) for name, t in tensors.items()})

    rewrite(folder, halve)
    with pytest.raises(ConfigError, match="stored as float16; say which dtype"):
        load_pretrained(folder)
    loaded = load_pretrained(folder, dtype="float32")
    assert loaded.embed.embedding.dtype == jnp.float32


def test_a_quantized_file_is_refused_by_name(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({Q: np.zeros((16, 16), np.int8)}))
    with pytest.raises(CheckpointError, match=f"{Q} is stored as I8; Fornax loads F64, F32"):
        load_pretrained(folder)


def test_a_missing_tensor_is_named(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.pop(Q))
    with pytest.raises(CheckpointError, match=rf"missing {Q} \[16, 16\]"):
        load_pretrained(folder)


def test_an_extra_tensor_is_named(folder: Path) -> None:
    extra = {"model.layers.2.mlp.up_proj.weight": np.zeros((2, 3), np.float32)}
    rewrite(folder, lambda tensors: tensors.update(extra))
    with pytest.raises(
        CheckpointError, match=r"unexpected model\.layers\.2\.mlp\.up_proj.weight \[2, 3\]"
    ):
        load_pretrained(folder)


def test_a_misshapen_tensor_is_named(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({Q: np.zeros((16, 8), np.float32)}))
    with pytest.raises(
        CheckpointError, match=rf"misshapen {Q} expected \[16, 16\], found \[16, 8\]"
    ):
        load_pretrained(folder)


def test_many_problems_are_counted(folder: Path) -> None:
    rewrite(folder, lambda tensors: [tensors.pop(name) for name in list(tensors)[:9]])
    with pytest.raises(CheckpointError, match="and 4 more"):
        load_pretrained(folder)


def test_computed_frequencies_of_old_files_are_left_out(folder: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(folder, lambda tensors: tensors.update({name: np.zeros(2, np.float32)}))
    assert_same(load_pretrained(folder), model())


def test_a_tied_head_may_lie_in_the_file_only_if_equal(tmp_path: Path) -> None:
    tied = create_decoder(dataclasses.replace(CONFIG, tie_embeddings=True))
    save_pretrained(tied, tmp_path)
    table = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    rewrite(tmp_path, lambda tensors: tensors.update({"lm_head.weight": table}))
    assert_same(load_pretrained(tmp_path), tied)
    rewrite(tmp_path, lambda tensors: tensors.update({"lm_head.weight": table + 1}))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from model\.embed_tokens"):
        load_pretrained(tmp_path)


@pytest.mark.parametrize("keep", [0, 5, 100, 0.5, 0.999])
def test_a_file_cut_short_is_refused(folder: Path, keep: float) -> None:
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: int(keep if keep >= 1 or keep == 0 else keep * len(whole))])
    with pytest.raises(CheckpointError, match=r"model\.safetensors .*cut short"):
        load_pretrained(folder)


@pytest.mark.parametrize("header", [b"{]", b"[]", b'{"a": 3}', b'{"a": {"dtype": "F32"}}'])
def test_a_damaged_header_is_refused(folder: Path, header: bytes) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(64))
    with pytest.raises(CheckpointError, match="damaged header"):
        load_pretrained(folder)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2, 2], "data_offsets": [-16, 0]},
        {"dtype": "F32", "shape": [-2, -2], "data_offsets": [0, 16]},
    ],
    ids=str,
)
def test_offsets_that_do_not_fit_are_refused(folder: Path, entry: dict[str, Any]) -> None:
    """A header must not make us read what is not the tensor."""
    header = json.dumps({Q: entry}).encode()
    file = folder / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(64))
    with pytest.raises(CheckpointError, match=f"{Q} of shape"):
        load_pretrained(folder)


class Sharded:
    """A directory whose weights lie in several files with an index."""

    def __init__(self, folder: Path):
        save_pretrained(model(), folder, max_shard_bytes=4_000)
        self.folder = folder
        self.index = folder / "model.safetensors.index.json"
        self.places: dict[str, str] = json.loads(self.index.read_text())["weight_map"]

    def write(self) -> None:
        self.index.write_text(json.dumps({"metadata": {}, "weight_map": self.places}))


@pytest.fixture
def sharded(tmp_path: Path) -> Sharded:
    return Sharded(tmp_path / "s")


def test_a_sharded_directory_is_loaded(sharded: Sharded) -> None:
    assert len(set(sharded.places.values())) > 2
    assert_same(load_pretrained(sharded.folder), model())


def test_a_missing_shard_is_named_with_a_tensor(sharded: Sharded) -> None:
    file = sharded.places[Q]
    (sharded.folder / file).unlink()
    with pytest.raises(CheckpointError, match=rf"{file} is missing; it holds model\."):
        load_pretrained(sharded.folder)


def test_an_index_that_names_a_tensor_that_is_not_there(sharded: Sharded) -> None:
    sharded.places["model.layers.7.mlp.up_proj.weight"] = sharded.places[Q]
    sharded.write()
    with pytest.raises(CheckpointError, match=r"model\.layers\.7\.mlp\.up_proj\.weight is in"):
        load_pretrained(sharded.folder)


def test_an_index_that_puts_a_tensor_in_another_file(sharded: Sharded) -> None:
    other = next(file for file in sharded.places.values() if file != sharded.places[Q])
    sharded.places[Q] = other
    sharded.write()
    with pytest.raises(CheckpointError, match=f"says that {Q} is in {other}, and it is not"):
        load_pretrained(sharded.folder)


@pytest.mark.parametrize("file", ["../{}", "/etc/{}", "sub/{}", "..", "", ".", 3, None, ["a"]])
def test_an_index_cannot_leave_its_directory(sharded: Sharded, file: Any) -> None:
    """The name must be a file's in the same directory, whatever lies at the other end."""
    name = sharded.places[Q]
    (sharded.folder.parent / name).write_bytes((sharded.folder / name).read_bytes())
    (sharded.folder / "sub").mkdir()
    (sharded.folder / "sub" / name).write_bytes((sharded.folder / name).read_bytes())
    sharded.places[Q] = file.format(name) if isinstance(file, str) else file
    sharded.write()
    with pytest.raises(CheckpointError, match=Q):
        load_pretrained(sharded.folder)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}'])
def test_a_damaged_index_is_refused(sharded: Sharded, text: str) -> None:
    sharded.index.write_text(text)
    with pytest.raises((CheckpointError, ConfigError), match="index"):
        load_pretrained(sharded.folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickled_weights_are_never_loaded(folder: Path, name: str) -> None:
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    with pytest.raises(CheckpointError, match=f"{name}.*unpickle"):
        load_pretrained(folder)


def test_what_is_not_a_model_directory(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere/config\.json cannot be read"):
        load_pretrained(tmp_path / "nowhere")
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        load_pretrained(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="is not JSON"):
        load_pretrained(folder)
    (folder / "config.json").write_text("[1]")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_pretrained(folder)


def test_a_config_of_another_model_names_the_tensors(folder: Path) -> None:
    configure(folder, num_hidden_layers=3)
    with pytest.raises(CheckpointError, match=r"missing model\.layers\.2\."):
        load_pretrained(folder)


@pytest.mark.slow
def test_a_selection_bias_stays_float32_and_further_heads_are_left_out(tmp_path: Path) -> None:
    """Beside bfloat16 weights; layers that predict tokens beyond the next are none of ours."""
    config = DecoderConfig(
        vocab_size=24,
        hidden_size=16,
        intermediate_size=32,
        num_layers=2,
        num_heads=2,
        rope=RopeConfig(interleaved=True),
        latent=LatentConfig(key_value_rank=8, unrotated_dim=4, rotated_dim=4, value_dim=6),
        mlp_pattern=("mlp", "experts"),
        experts=ExpertsConfig(
            num_experts=4,
            experts_per_token=2,
            intermediate_size=8,
            score="sigmoid",
            normalize_eps=1e-20,
            selection_bias=True,
            shared_intermediate_size=8,
        ),
    )
    made = create_decoder(config, seed=2, dtype=jnp.bfloat16)
    bias = jnp.array([[0.1, 0.2, 0.3, 1e-5]], jnp.float32)
    made.layers.experts.selection_bias.set_value(bias)
    save_pretrained(made, tmp_path / "m")
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert load_file(tmp_path / "m" / "model.safetensors")[name].dtype == np.float32

    def add_head(tensors: dict[str, np.ndarray]) -> None:
        tensors["model.layers.2.eh_proj.weight"] = np.zeros((4, 4), np.float32)

    rewrite(tmp_path / "m", add_head)
    with pytest.raises(CheckpointError, match=r"unexpected model\.layers\.2\.eh_proj\.weight"):
        load_pretrained(tmp_path / "m", dtype="bfloat16")
    configure(tmp_path / "m", num_nextn_predict_layers=1)
    again = load_pretrained(tmp_path / "m")
    assert_same(again, made)
    assert again.embed.embedding.dtype == jnp.bfloat16
    assert again.layers.experts.selection_bias.dtype == jnp.float32
