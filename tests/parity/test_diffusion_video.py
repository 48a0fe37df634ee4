"""Networks of videos beside diffusers' own, with tiny random weights, in float32, by folder."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import (
    AutoencoderKLHunyuanVideo,
    AutoencoderKLLTXVideo,
    AutoencoderKLQwenImage,
    AutoencoderKLWan,
    HunyuanVideoTransformer3DModel,
    LTXPipeline,
    LTXVideoTransformer3DModel,
    WanTransformer3DModel,
)
from tests.parity.diffusion_models import (
    channels_first,
    check_output,
    folder_of,
    loaded,
    randomized,
    run,
)

from fornax.diffusion.models import Condition, load_component
from fornax.diffusion.models.autoencoders import Tiling

pytestmark = pytest.mark.parity
RNG = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param(
            {"in_channels": 9, "cross_attn_norm": False, "patch_size": (2, 1, 2), "eps": 1e-3},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["text", "first frame"],
)
@torch.no_grad()
def test_wans_transformer(options: dict[str, Any], tmp_path: Path) -> None:
    config = {
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "in_channels": 4,
        "out_channels": 4,
        "text_dim": 12,
        "freq_dim": 16,
        "ffn_dim": 24,
        "num_layers": 2,
    }
    network = randomized(WanTransformer3DModel(**{**config, **options}))
    module = loaded(network, tmp_path)
    image = options.get("in_channels", 4) - 4
    x, text, times = normal(2, 4, 6, 8, 4 + image), normal(2, 5, 12), np.float32([3, 997])
    want = network(channels_first(x), torch.from_numpy(times), torch.from_numpy(text)).sample
    condition = Condition(
        text_BSD=jnp.asarray(text), image_BX=jnp.asarray(x[..., 4:]) if image else None
    )
    found = run(module, x[..., :4], times, condition)
    check_output(np.moveaxis(np.asarray(found), -1, 1), want)


@pytest.mark.exhaustive
@torch.no_grad()
def test_wans_transformer_with_an_images_states(tmp_path: Path) -> None:
    """Theirs has them before the text's, of which there must be 512."""
    network = WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=9,
        out_channels=4,
        text_dim=12,
        freq_dim=16,
        ffn_dim=24,
        num_layers=2,
        image_dim=10,
        added_kv_proj_dim=32,
    )
    module = loaded(randomized(network), tmp_path)
    x, text, states = normal(1, 2, 4, 4, 9), normal(1, 512, 12), normal(1, 5, 10)
    times = np.float32([500])
    given = (torch.from_numpy(each) for each in (times, text, states))
    want = network(channels_first(x), *given).sample
    condition = Condition(
        text_BSD=jnp.asarray(text), text2_BSD=jnp.asarray(states), image_BX=jnp.asarray(x[..., 4:])
    )
    found = run(module, x[..., :4], times, condition)
    check_output(np.moveaxis(np.asarray(found), -1, 1), want)


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"guidance_embeds": False, "patch_size_t": 2}, marks=pytest.mark.slow),
    ],
    ids=["guidance", "patches"],
)
@torch.no_grad()
def test_hunyuan_videos_transformer(options: dict[str, Any], tmp_path: Path) -> None:
    """Of texts of two lengths: the mean that the refiner embeds leaves padding out."""
    config = {
        "in_channels": 4,
        "out_channels": 4,
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "num_layers": 1,
        "num_single_layers": 2,
        "num_refiner_layers": 2,
        "text_embed_dim": 12,
        "pooled_projection_dim": 6,
        "rope_axes_dim": (4, 6, 6),
    }
    network = randomized(HunyuanVideoTransformer3DModel(**{**config, **options}))
    module = loaded(network, tmp_path)
    x, text, pooled = normal(2, 4, 6, 4, 4), normal(2, 5, 12), normal(2, 6)
    times, guidance = np.float32([3, 997]), np.float32([4.0, 6.5])
    mask = np.int32([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    guided = options.get("guidance_embeds", True)
    want = network(
        channels_first(x),
        torch.from_numpy(times),
        torch.from_numpy(text),
        torch.from_numpy(mask),
        torch.from_numpy(pooled),
        guidance=torch.from_numpy(1000 * guidance) if guided else None,
    ).sample
    condition = Condition(
        text_BSD=jnp.asarray(text),
        text_mask_BS=jnp.asarray(mask),
        pooled_BD=jnp.asarray(pooled),
        guidance_B=jnp.asarray(guidance) if guided else None,
    )
    found = run(module, x, times, condition)
    check_output(np.moveaxis(np.asarray(found), -1, 1), want)


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param(
            {
                "patch_size": 2,
                "patch_size_t": 2,
                "in_channels": 16,
                "out_channels": 24,
                "norm_elementwise_affine": True,
                "attention_bias": False,
                "attention_out_bias": False,
                "activation_fn": "geglu",
            },
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=["plain", "patches"],
)
@torch.no_grad()
def test_ltx_videos_transformer(options: dict[str, Any], tmp_path: Path) -> None:
    """Of a width that three axes do not divide."""
    config = {
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "in_channels": 4,
        "out_channels": 4,
        "cross_attention_dim": 32,
        "caption_channels": 12,
        "num_layers": 2,
    }
    network = randomized(LTXVideoTransformer3DModel(**{**config, **options}))
    module = loaded(network, tmp_path)
    side, frames = options.get("patch_size", 1), options.get("patch_size_t", 1)
    channels = options.get("in_channels", 4) // (frames * side**2)
    x, text, times = normal(2, 4, 6, 4, channels), normal(2, 5, 12), np.float32([3, 997])
    mask = np.int32([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    rate = 8 / 25
    grid = 4 // frames, 6 // side, 4 // side
    want = network(
        LTXPipeline._pack_latents(channels_first(x), side, frames),
        torch.from_numpy(text),
        torch.from_numpy(times),
        torch.from_numpy(mask),
        *grid,
        rope_interpolation_scale=(rate, 32, 32),
    ).sample
    condition = Condition(
        text_BSD=jnp.asarray(text),
        text_mask_BS=jnp.asarray(mask),
        sizes_BN=jnp.tile(jnp.float32([rate, 32, 32]), (2, 1)),
    )
    found = np.moveaxis(np.asarray(run(module, x, times, condition)), -1, 1)
    check_output(found, LTXPipeline._unpack_latents(want, *grid, side, frames))


SIZES = {
    "base_dim": 8,
    "z_dim": 4,
    "dim_mult": [1, 2, 2],
    "num_res_blocks": 1,
    "temperal_downsample": [True, True],
    "latents_mean": [0.1, 0.2, 0.3, 0.4],
    "latents_std": [1.5, 1.4, 1.3, 1.2],
}
WAN_2_2 = {
    **SIZES,
    "decoder_base_dim": 4,
    "is_residual": True,
    "in_channels": 12,
    "out_channels": 12,
    "patch_size": 2,
    "scale_factor_spatial": 8,
}


@pytest.mark.parametrize(
    ("kind", "options", "channels"),
    [
        (AutoencoderKLWan, {**SIZES, "scale_factor_spatial": 4}, 3),
        (AutoencoderKLWan, WAN_2_2, 3),
        pytest.param(
            AutoencoderKLQwenImage,
            {**SIZES, "input_channels": 4, "num_res_blocks": 2},
            4,
            marks=pytest.mark.slow,
        ),
    ],
    ids=["wan 2.1", "wan 2.2", "qwen-image"],
)
@torch.no_grad()
def test_autoencoders_of_wan(
    kind: Any, options: dict[str, Any], channels: int, tmp_path: Path
) -> None:
    """All frames at once here, a few at a time there."""
    network = randomized(kind(**options))
    module: Any = loaded(network, tmp_path)
    video = np.clip(normal(1, 9, 16, 24, channels), -1, 1)
    theirs = network.encode(channels_first(video)).latent_dist
    found = module.encode(jnp.asarray(video), chunk=None)
    check_output(np.moveaxis(np.asarray(found.mean_BHWC), -1, 1), theirs.mean)
    check_output(np.moveaxis(np.asarray(found.logvar_BHWC), -1, 1), theirs.logvar)
    z = np.moveaxis(theirs.mean.numpy(), 1, -1)
    decoded = module.decode(jnp.asarray(z), chunk=None)
    check_output(np.moveaxis(np.asarray(decoded), -1, 1), network.decode(theirs.mean).sample)


@pytest.mark.exhaustive
@torch.no_grad()
def test_tiles_of_a_video(tmp_path: Path) -> None:
    network: Any = randomized(AutoencoderKLWan(**SIZES, scale_factor_spatial=4))
    network.enable_tiling(16, 16, 12, 12)
    module: Any = load_component(folder_of(network, tmp_path / "theirs"))
    z = normal(1, 1, 7, 4, 4)
    want = network.decode(channels_first(z)).sample
    found = module.decode(jnp.asarray(z), tiling=Tiling(size=16, overlap=0.25))
    check_output(np.moveaxis(np.asarray(found), -1, 1), want)
    video = np.clip(normal(1, 1, 28, 16, 3), -1, 1)
    encoded = network.encode(channels_first(video)).latent_dist.mean
    ours = module.encode(jnp.asarray(video), tiling=Tiling(size=16, overlap=0.25)).mean_BHWC
    check_output(np.moveaxis(np.asarray(ours), -1, 1), encoded)


@pytest.mark.parametrize(
    ("options", "frames"),
    [
        ({"mid_block_add_attention": True}, 9),
        pytest.param({"mid_block_add_attention": False}, 21, marks=pytest.mark.exhaustive),
    ],
    ids=["whole", "runs of frames"],
)
@torch.no_grad()
def test_autoencoder_of_hunyuan_video(options: dict[str, Any], frames: int, tmp_path: Path) -> None:
    """A longer video is cut into runs of frames there by default, and here."""
    sizes = {
        "latent_channels": 4,
        "down_block_types": ["HunyuanVideoDownBlock3D"] * 3,
        "up_block_types": ["HunyuanVideoUpBlock3D"] * 3,
        "block_out_channels": [8, 8, 16],
        "layers_per_block": 1,
        "norm_num_groups": 4,
        "spatial_compression_ratio": 4,
    }
    network: Any = randomized(AutoencoderKLHunyuanVideo(**sizes, **options))
    module: Any = loaded(network, tmp_path)
    video = np.clip(normal(1, frames, 16, 8, 3), -1, 1)
    theirs = network.encode(channels_first(video)).latent_dist.mean
    found = module.encode(jnp.asarray(video)).mean_BHWC
    check_output(np.moveaxis(np.asarray(found), -1, 1), theirs)
    decoded = module.decode(jnp.moveaxis(jnp.asarray(theirs.numpy()), 1, -1))
    check_output(np.moveaxis(np.asarray(decoded), -1, 1), network.decode(theirs).sample)


LTX = {
    "latent_channels": 4,
    "block_out_channels": [4, 8],
    "down_block_types": ["LTXVideoDownBlock3D"] * 2,
    "layers_per_block": [1, 1, 1],
    "spatio_temporal_scaling": [True, False],
    "downsample_type": ["conv", "conv"],
    "decoder_block_out_channels": [4, 8],
    "decoder_layers_per_block": [1, 1, 1],
    "decoder_spatio_temporal_scaling": [True, False],
    "decoder_inject_noise": [False] * 3,
    "upsample_residual": [False] * 2,
    "upsample_factor": [1, 1],
    "patch_size": 2,
    "scaling_factor": 1.5,
}
LTX_0_9_5 = {
    **LTX,
    "block_out_channels": [4, 4, 8, 8],
    "down_block_types": ["LTXVideo095DownBlock3D"] * 3,
    "layers_per_block": [1, 1, 1, 1],
    "spatio_temporal_scaling": [True] * 3,
    "downsample_type": ["spatial", "temporal", "spatiotemporal"],
    "decoder_block_out_channels": [8, 16],
    "decoder_spatio_temporal_scaling": [True, True],
    "upsample_residual": [True] * 2,
    "upsample_factor": [2, 2],
    "timestep_conditioning": True,
    "decoder_causal": True,
    "spatial_compression_ratio": 8,
    "temporal_compression_ratio": 4,
}


@pytest.mark.parametrize(
    "options", [LTX, pytest.param(LTX_0_9_5, marks=pytest.mark.exhaustive)], ids=["0.9", "0.9.5"]
)
@torch.no_grad()
def test_autoencoder_of_ltx_video(options: dict[str, Any], tmp_path: Path) -> None:
    """With strides of convolutions, and with places as channels and a decoder that denoises."""
    network: Any = randomized(AutoencoderKLLTXVideo(**options))
    network.latents_mean.copy_(torch.tensor([0.1, -0.2, 0.3, 0.4]))
    network.latents_std.copy_(torch.tensor([1.5, 1.4, 0.7, 1.2]))
    module: Any = loaded(network, tmp_path)
    video = np.clip(normal(1, 9, 16, 8, 3), -1, 1)
    theirs = network.encode(channels_first(video)).latent_dist
    found = module.encode(jnp.asarray(video))
    check_output(np.moveaxis(np.asarray(found.mean_BHWC), -1, 1), theirs.mean)
    check_output(np.moveaxis(np.asarray(found.logvar_BHWC), -1, 1), theirs.logvar)
    time = np.float32([0.05]) if "timestep_conditioning" in options else None
    want = network.decode(theirs.mean, None if time is None else torch.from_numpy(time)).sample
    latents = module.latents(jnp.asarray(video))
    decoded = module.videos(latents, None if time is None else jnp.asarray(time))
    check_output(np.moveaxis(np.asarray(decoded), -1, 1), want)
