"""Adapters' files beside diffusers and PEFT: ours read by them, theirs read by us."""

from pathlib import Path

import diffusers
import jax
import numpy as np
import peft
import pytest
import torch
from flax import nnx
from safetensors.numpy import save_file
from tests.parity.diffusion_models import channels_first, check_output, folder_of, randomized, run

from fornax.adapters import LoRA, LoRAParam, attach
from fornax.diffusion.lora import files, merge_lora, read_lora, save_lora
from fornax.diffusion.models import Condition, load_component

pytestmark = pytest.mark.parity
RNG = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


def unet() -> tuple:
    """A U-Net, its input, and its condition: gated MLPs are one tensor of theirs, two of ours."""
    network = diffusers.UNet2DConditionModel(
        block_out_channels=(16, 32),
        norm_num_groups=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=24,
        attention_head_dim=4,
        layers_per_block=1,
        sample_size=8,
    )
    return network, normal(2, 8, 8, 4), normal(2, 5, 24), "unet"


def sd3() -> tuple:
    network = diffusers.SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=24,
        caption_projection_dim=32,
        pooled_projection_dim=16,
        out_channels=4,
        pos_embed_max_size=12,
    )
    return network, normal(2, 8, 8, 4), normal(2, 5, 24), "transformer"


def flux() -> tuple:
    """A transformer of which one tensor of theirs has the inputs of two of ours."""
    network = diffusers.FluxTransformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=24,
        pooled_projection_dim=16,
        axes_dims_rope=(4, 6, 6),
    )
    return network, normal(2, 4, 6, 4), normal(2, 5, 24), "transformer"


TIMES, POOLED = np.asarray([10.0, 700.0], np.float32), normal(2, 16)


def outputs(ours: nnx.Module, theirs: torch.nn.Module, x, text) -> tuple:
    """Both networks' outputs, theirs channels last."""
    pooled = None if isinstance(theirs, diffusers.UNet2DConditionModel) else POOLED
    found = run(ours, x, TIMES, Condition(text_BSD=text, pooled_BD=pooled))
    words, given = torch.from_numpy(text), {}
    if pooled is not None:
        given["pooled_projections"] = torch.from_numpy(pooled)
    time = torch.from_numpy(TIMES)
    if not isinstance(theirs, diffusers.FluxTransformer2DModel):
        want = theirs(channels_first(x), timestep=time, encoder_hidden_states=words, **given).sample
        return found, want.movedim(1, -1)
    height, width = x.shape[1:3]
    pack = diffusers.FluxPipeline
    packed = pack._pack_latents(channels_first(x), 2, 4, height, width)
    places = pack._prepare_latent_image_ids(2, height // 2, width // 2, "cpu", torch.float32)
    want = theirs(
        packed,
        timestep=time / 1000,
        encoder_hidden_states=words,
        img_ids=places,
        txt_ids=torch.zeros(text.shape[1], 3),
        **given,
    ).sample
    return found, pack._unpack_latents(want, 4 * height, 4 * width, 4).movedim(1, -1)


@pytest.mark.parametrize(
    "made", [unet, pytest.param(sd3, marks=pytest.mark.slow), flux], ids=["unet", "sd3", "flux"]
)
@torch.no_grad()
def test_adapters_are_read_by_diffusers_and_back(made, tmp_path: Path) -> None:
    theirs, x, text, prefix = made()
    randomized(theirs)
    ours = load_component(folder_of(theirs, tmp_path / "model"))
    plain = outputs(ours, theirs, x, text)[0]
    attach(ours, LoRA(rank=3, alpha=5.0), rngs=nnx.Rngs(0))
    graph, adapted, rest = nnx.split(ours, LoRAParam, ...)
    adapted = jax.tree.map(lambda leaf: 0.3 * normal(*leaf.shape), adapted)
    ours = nnx.merge(graph, adapted, rest)
    save_lora(ours, tmp_path / "lora", prefix)
    theirs.load_lora_adapter(tmp_path / "lora" / "pytorch_lora_weights.safetensors", prefix=prefix)
    found, want = outputs(ours, theirs, x, text)
    assert np.abs(found - plain).max() > 0.1 * np.abs(plain).max()
    check_output(found, want)
    for path in (tmp_path / "lora", tmp_path / "peft"):
        if path.name == "peft":  # the two other files alone
            path.mkdir()
            for name in ("adapter_config.json", "adapter_model.safetensors"):
                (tmp_path / "lora" / name).rename(path / name)
        again = load_component(tmp_path / "model")
        merge_lora(again, read_lora(path, again, prefix))
        check_output(outputs(again, theirs, x, text)[0], want)
    base = type(theirs).from_pretrained(tmp_path / "model")
    wrapped = peft.PeftModel.from_pretrained(base, str(tmp_path / "peft"))
    check_output(found, outputs(ours, wrapped.base_model.model, x, text)[1])


@torch.no_grad()
def test_adapters_of_diffusers_are_read_with_their_alphas(tmp_path: Path) -> None:
    """Written by a pipeline's own method: a rank of their own for some, alphas in the metadata."""
    theirs, x, text, _ = unet()
    randomized(theirs)
    ours = load_component(folder_of(theirs, tmp_path / "model"))
    config = peft.LoraConfig(
        r=4,
        lora_alpha=6,
        target_modules=["to_q", "to_k", "to_out.0", "ff.net.0.proj", "proj_in"],
        rank_pattern={"to_q": 2},
        alpha_pattern={"to_k": 8},
        init_lora_weights=False,
    )
    theirs.add_adapter(config)
    layers = peft.get_peft_model_state_dict(theirs)
    said = diffusers.training_utils._collate_lora_metadata({"unet": theirs})
    diffusers.StableDiffusionPipeline.save_lora_weights(
        tmp_path / "lora", unet_lora_layers=layers, **said
    )
    merge_lora(ours, read_lora(tmp_path / "lora", ours, "unet"))
    found, want = outputs(ours, theirs, x, text)
    theirs.disable_adapters()
    assert (outputs(ours, theirs, x, text)[1] - want).abs().max() > 0.05 * want.abs().max()
    check_output(found, want)


XL = {
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "block_out_channels": (8, 16, 32),
    "norm_num_groups": 4,
    "cross_attention_dim": 24,
    "attention_head_dim": (1, 2, 4),
    "layers_per_block": 2,
    "transformer_layers_per_block": (1, 1, 2),
    "use_linear_projection": True,
}
"""Levels as SDXL's, of which `input_blocks_4` is the first with attention."""


@pytest.mark.parametrize(
    "original",
    [
        pytest.param(False, marks=pytest.mark.exhaustive, id="diffusers"),
        pytest.param(True, marks=pytest.mark.slow, id="original"),
    ],
)
def test_names_of_kohya_are_read_as_diffusers_converts_them(original: bool, tmp_path: Path) -> None:
    """Names of diffusers' blocks for SD 1.x, of the original code's for SDXL, with alphas."""
    theirs = diffusers.UNet2DConditionModel(**XL)
    ours = load_component(folder_of(theirs, tmp_path / "model"))
    config, tensors = ours.config, {}
    for flat, name in (files._flat_original if original else files._flat)(config).items():
        if not name.endswith(("to_q", "to_out.0", "ff.net.0.proj", "proj_in")):
            continue
        outputs, inputs = theirs.get_submodule(name).weight.shape
        tensors[f"lora_unet_{flat}.lora_down.weight"] = normal(3, inputs)
        tensors[f"lora_unet_{flat}.lora_up.weight"] = normal(outputs, 3)
        tensors[f"lora_unet_{flat}.alpha"] = np.asarray(1.5, np.float32)
    assert any("lora_unet_input_blocks_4_1_proj_in." in name for name in tensors) == original
    save_file(tensors, tmp_path / "kohya.safetensors")
    state, alphas = diffusers.StableDiffusionXLPipeline.lora_state_dict(
        str(tmp_path / "kohya.safetensors"), unet_config=theirs.config
    )
    theirs.load_lora_adapter(state, network_alphas=alphas, prefix="unet")
    found = read_lora(tmp_path / "kohya.safetensors", ours, "unet")
    theirs.fuse_lora()
    theirs.unload_lora()
    merge_lora(ours, found)
    folder_of(theirs, tmp_path / "fused")
    want = load_component(tmp_path / "fused")
    for one, other in zip(
        jax.tree.leaves(nnx.state(ours)), jax.tree.leaves(nnx.state(want)), strict=True
    ):
        np.testing.assert_allclose(one, other, atol=1e-5)
