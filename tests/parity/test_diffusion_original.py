"""Single files of the original code: names beside diffusers' own conversion of them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from diffusers.loaders.single_file_utils import (
    convert_ldm_unet_checkpoint,
    convert_ldm_vae_checkpoint,
)
from flax import nnx
from safetensors.numpy import load_file, save_file
from tests.parity.diffusers_cases import LEVELS, SMALL, UNETS, cases
from tests.parity.diffusion_models import folder_of

from fornax.config.errors import CheckpointError, ConfigError
from fornax.diffusion.models import files, load_component, original
from fornax.diffusion.models.keys import parameters, plan
from fornax.diffusion.models.unet import UNET_2D_CONDITION, UNet

pytestmark = pytest.mark.parity


def stored(module: Any, keys: Any, prefix: str) -> dict[str, np.ndarray]:
    """A module's tensors with the original code's names."""
    values = {path: np.asarray(one.get_value()) for path, one in parameters(module).items()}
    found = {}
    for tensor in plan(module, keys):
        slots = [
            values[s.path] if s.layer is None else values[s.path][s.layer] for s in tensor.slots
        ]
        found[prefix + tensor.name] = tensor.whole(slots)
    return found


def check(found: dict[str, torch.Tensor], folder: Path) -> None:
    want = load_file(folder / "diffusion_pytorch_model.safetensors")
    assert found.keys() == want.keys()
    for name, array in want.items():
        np.testing.assert_array_equal(found[name].numpy().reshape(array.shape), array, name)


def same(one: Any, other: Any) -> None:
    left, right = parameters(one), parameters(other)
    assert left.keys() == right.keys()
    for path, variable in left.items():
        np.testing.assert_array_equal(variable[...], right[path][...], path)


@pytest.mark.parametrize("case", cases("sdxl", of=("sd1", "sdxl", "projection")))
def test_unets_of_single_files_have_the_original_names(case: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {**SMALL, **UNETS[case], "layers_per_block": 2}
    if case == "projection":
        options["mid_block_type"] = "UNetMidBlock2DCrossAttn"
    model = UNet2DConditionModel(**options)
    unet: Any = load_component(folder_of(model, tmp_path / "folder"))
    names = original.original_unet_keys(unet.config)
    tensors = stored(unet, names, "model.diffusion_model.")
    theirs = {name: torch.tensor(array) for name, array in tensors.items()}
    check(convert_ldm_unet_checkpoint(theirs, dict(model.config)), tmp_path / "folder")
    # As the text encoders of released files have.
    others = {
        "cond_stage_model.transformer.text_model.embeddings.position_ids": np.arange(77)[None]
    }
    save_file({**tensors, **others}, tmp_path / "one.safetensors")
    read = original.load_original_unet(tmp_path / "one.safetensors", config=unet.config)
    same(read, unet)
    with pytest.raises(ConfigError, match="text of width 24 is none of 768, 1024, 2048"):
        original.load_original_unet(tmp_path / "one.safetensors")
    with pytest.raises(CheckpointError, match="begins with first_stage_model"):
        original.load_original_autoencoder(tmp_path / "one.safetensors")


def test_autoencoders_of_single_files_have_the_original_names(tmp_path: Path) -> None:
    model = AutoencoderKL(**LEVELS)
    ours: Any = load_component(folder_of(model, tmp_path / "folder"))
    tensors = stored(ours, original.original_kl_keys(ours.config), "first_stage_model.")
    assert tensors["first_stage_model.decoder.mid.attn_1.q.weight"].shape == (16, 16, 1, 1)
    theirs = {name: torch.tensor(array) for name, array in tensors.items()}
    check(convert_ldm_vae_checkpoint(theirs, dict(model.config)), tmp_path / "folder")
    save_file(tensors, tmp_path / "one.safetensors")
    read = original.load_original_autoencoder(tmp_path / "one.safetensors", config=ours.config)
    same(read, ours)
    extra = {"first_stage_model.more": np.zeros(1, np.float32)}
    save_file({**tensors, **extra}, tmp_path / "more.safetensors")
    with pytest.raises(CheckpointError, match=r"which its config has no place for; .* config="):
        original.load_original_autoencoder(tmp_path / "more.safetensors", config=ours.config)
    alone = {name.removeprefix("first_stage_model."): x for name, x in tensors.items()}
    save_file(alone, tmp_path / "alone.safetensors")
    same(
        original.load_original_autoencoder(tmp_path / "alone.safetensors", config=ours.config), ours
    )
    with pytest.raises(ConfigError, match="differ in their scale"):
        original.load_original_autoencoder(tmp_path / "alone.safetensors")


def test_attention_of_older_files_is_read(tmp_path: Path) -> None:
    model = AutoencoderKL(**LEVELS)
    ours: Any = load_component(folder_of(model, tmp_path))
    file = tmp_path / "diffusion_pytorch_model.safetensors"
    older = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
    tensors = load_file(file)
    for new, old in older.items():
        tensors = {name.replace(f".{new}.", f".{old}."): x for name, x in tensors.items()}
    save_file(tensors, file)
    same(load_component(tmp_path), ours)


XL = {
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "block_out_channels": (320, 640, 1280),
    "cross_attention_dim": 2048,
    "attention_head_dim": (5, 10, 20),
    "transformer_layers_per_block": (1, 2, 10),
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}
RELEASED: dict[int, dict[str, Any]] = {
    768: {"cross_attention_dim": 768},
    1024: {
        "cross_attention_dim": 1024,
        "attention_head_dim": (5, 10, 20, 20),
        "use_linear_projection": True,
    },
    2048: XL,
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("width", RELEASED)
def test_released_unets_have_the_tensors_of_diffusers(width: int) -> None:
    with torch.device("meta"):
        model = UNet2DConditionModel(**RELEASED[width])
    want = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    config = original.UNETS[width]
    values = {key: value for key, value in model.config.items() if not key.startswith("_")}
    assert UNET_2D_CONDITION.read(files.Fields(values, "config.json")) == config
    module = nnx.eval_shape(lambda: UNet(config, rngs=nnx.Rngs(0)))
    tensors = plan(module, UNET_2D_CONDITION.keys(config))
    assert {tensor.name: tensor.shape for tensor in tensors} == want
