"""Saving a directory: whole or not at all, and only what a Hugging Face family can express."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file
from tests.unit.models.test_load import CONFIG, assert_same, model

from fornax.config import files
from fornax.config.errors import CheckpointError, ConfigError
from fornax.mesh import MeshConfig, make_mesh
from fornax.models import (
    Decoder,
    abstract_decoder,
    create_decoder,
    load_pretrained,
    save,
    save_pretrained,
)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@functools.cache
def other() -> Decoder:
    """The same model with other weights."""
    return create_decoder(CONFIG, seed=2)


def test_the_directory_holds_what_others_expect(tmp_path: Path) -> None:
    save_pretrained(model(), tmp_path / "m")
    assert set(contents(tmp_path / "m")) == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
    }
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["torch_dtype"] == "float32"
    kernel = np.asarray(model().layers.attention.q.kernel[...][1])
    stored = load_file(tmp_path / "m" / "model.safetensors")
    np.testing.assert_array_equal(
        stored["model.layers.1.self_attn.q_proj.weight"], kernel.reshape(16, 16).T
    )
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


@pytest.mark.slow
def test_a_sharded_model_is_saved_whole(tmp_path: Path) -> None:
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    save_pretrained(create_decoder(CONFIG, seed=1, mesh=mesh), tmp_path / "m")
    assert_same(load_pretrained(tmp_path / "m"), model())


def test_an_existing_directory_is_replaced_only_when_asked(tmp_path: Path) -> None:
    save_pretrained(model(), tmp_path)
    before = contents(tmp_path)
    with pytest.raises(CheckpointError, match="exists; give another path, or overwrite=True"):
        save_pretrained(other(), tmp_path)
    assert contents(tmp_path) == before
    save_pretrained(other(), tmp_path, overwrite=True)
    assert_same(load_pretrained(tmp_path), other())


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_save_that_fails_leaves_the_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """The second file of weights fails; what was there is untouched and nothing is left beside."""
    target = tmp_path / "m"
    save_pretrained(model(), target)
    before = contents(target)
    written: list[Path] = []
    real = save.save_file

    def failing(tensors: Any, path: Path, metadata: Any = None) -> None:
        if written:
            raise error
        written.append(path)
        real(tensors, path, metadata=metadata)

    monkeypatch.setattr(save, "save_file", failing)
    with pytest.raises((CheckpointError, KeyboardInterrupt)) as caught:
        save_pretrained(other(), target, max_shard_bytes=4_000, overwrite=True)
    assert isinstance(caught.value, KeyboardInterrupt) or "No space left" in str(caught.value)
    assert written
    assert contents(target) == before
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_a_swap_that_fails_puts_the_old_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "m"
    save_pretrained(model(), target)
    before = contents(target)
    real = Path.rename

    def failing(self: Path, to: Path) -> Path:
        if self.name.endswith(".tmp"):
            raise OSError(5, "Input/output error")
        return real(self, to)

    monkeypatch.setattr(files, "_exchange", lambda work, target: False)  # as other systems do
    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(CheckpointError, match="Input/output error"):
        save_pretrained(other(), target, overwrite=True)
    assert contents(target) == before
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_overwriting_never_deletes_what_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        save_pretrained(model(), tmp_path, overwrite=True)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_a_link_to_a_directory_stays_a_link(tmp_path: Path) -> None:
    save_pretrained(model(), tmp_path / "real")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    save_pretrained(other(), tmp_path / "link", overwrite=True)
    assert (tmp_path / "link").is_symlink()
    assert_same(load_pretrained(tmp_path / "real"), other())


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot write"):
        save_pretrained(model(), tmp_path / "file" / "m")


def test_tokenizer_files_come_along(tmp_path: Path) -> None:
    tokenizer = tmp_path / "t"
    tokenizer.mkdir()
    with pytest.raises(CheckpointError, match=r"no tokenizer files; expected some of .*tokenizer"):
        save_pretrained(model(), tmp_path / "m", tokenizer)
    assert not (tmp_path / "m").exists()
    (tokenizer / "tokenizer.json").write_text("{}")
    (tokenizer / "notes.txt").write_text("")
    save_pretrained(model(), tmp_path / "m", tokenizer)
    assert (tmp_path / "m" / "tokenizer.json").read_text() == "{}"
    assert not (tmp_path / "m" / "notes.txt").exists()


def test_token_ids_are_saved_for_generation(tmp_path: Path) -> None:
    named = nnx.clone(model())
    named.config = dataclasses.replace(CONFIG, bos_token_id=1, eos_token_ids=(2, 5), pad_token_id=0)
    save_pretrained(named, tmp_path)
    assert json.loads((tmp_path / "generation_config.json").read_text()) == {
        "bos_token_id": 1,
        "eos_token_id": [2, 5],
        "pad_token_id": 0,
    }
    assert load_pretrained(tmp_path).config.eos_token_ids == (2, 5)


def test_what_no_family_can_express_is_refused(tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, qk_norm="head", final_logit_softcap=3.0)
    with pytest.raises(ConfigError, match=r"no Hugging Face family .*cannot express .*softcap=3"):
        save_pretrained(abstract_decoder(config), tmp_path / "m")
    assert not (tmp_path / "m").exists()


def test_a_swapped_module_has_no_name_to_save_under(tmp_path: Path) -> None:
    class Gain(nnx.Module):
        def __init__(self) -> None:
            self.gain = nnx.Param(jnp.ones(3), axes=(None,))

    swapped = nnx.clone(model())
    swapped.final_norm = Gain()
    with pytest.raises(ConfigError, match="final_norm/gain has no name"):
        save_pretrained(swapped, tmp_path / "m")


def test_a_model_of_two_dtypes_keeps_both(tmp_path: Path) -> None:
    """A norm kept in float32 beside bfloat16 matrices is stored as it is."""
    save_pretrained(model(), tmp_path / "m")
    mixed = load_pretrained(tmp_path / "m", dtype="bfloat16")
    mixed.final_norm.scale.set_value(jnp.full(16, 1.001, jnp.float32))
    save_pretrained(mixed, tmp_path / "mixed")
    with pytest.raises(ConfigError, match="stored as bfloat16, float32; say which dtype"):
        load_pretrained(tmp_path / "mixed")
    loaded = load_pretrained(tmp_path / "mixed", dtype="float32")
    np.testing.assert_array_equal(loaded.final_norm.scale[...], np.full(16, np.float32(1.001)))
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(nnx.state(loaded)))
