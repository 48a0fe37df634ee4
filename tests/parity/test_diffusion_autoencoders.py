"""Image autoencoders beside those of diffusers: whole images, tiles, and scaled latents."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import AutoencoderDC, AutoencoderKL, AutoencoderKLFlux2
from diffusers.pipelines.flux2 import Flux2Pipeline
from tests.parity.diffusers_cases import LEVELS, cases
from tests.parity.diffusion_models import channels_first, check_output, loaded, randomized

from fornax.diffusion.models.autoencoders import Tiling

pytestmark = pytest.mark.parity

RNG = np.random.default_rng(0)


def close(found: jax.Array, want: torch.Tensor) -> None:
    check_output(jnp.moveaxis(found, -1, 1), want)


def images(height: int, width: int) -> np.ndarray:
    return RNG.uniform(-1, 1, size=(2, height, width, 3)).astype(np.float32)


def moments(ours: Any, x: np.ndarray, tiling: Tiling | None = None) -> jax.Array:
    found = jax.jit(lambda x: ours.encode(x, tiling=tiling))(jnp.asarray(x))
    return jnp.concatenate([found.mean_BHWC, found.logvar_BHWC], axis=-1)


KL: dict[str, dict[str, Any]] = {
    "sd": {"scaling_factor": 0.13, "layers_per_block": 2},
    "flux": {
        "latent_channels": 6,
        "use_quant_conv": False,
        "use_post_quant_conv": False,
        "shift_factor": 0.1,
        "scaling_factor": 0.36,
        "mid_block_add_attention": False,
        "force_upcast": False,
        "act_fn": "gelu",
    },
}


@pytest.mark.parametrize("case", cases("flux", of=KL))
def test_kl_autoencoders_are_those_of_diffusers(case: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    options = KL[case]
    model = randomized(AutoencoderKL(**{**LEVELS, "sample_size": 16, **options}))
    ours: Any = loaded(model, tmp_path)
    x = images(28, 20) if case == "sd" else images(20, 16)  # four shapes of tiles, and two
    shift = options.get("shift_factor", 0.0)
    with torch.no_grad():
        for tiling in (None, Tiling(size=16, overlap=0.25)):
            if tiling is not None:
                model.enable_tiling()
            want = model.encode(channels_first(x)).latent_dist
            latents = (want.mean - shift) * options["scaling_factor"]
            found = moments(ours, x, tiling)
            close(found, torch.cat([want.mean, want.logvar], 1))
            decoded = model.decode(latents / options["scaling_factor"] + shift).sample
            scaled = ours.scaled(found[..., : found.shape[-1] // 2])
            close(scaled, latents)
            close(jax.jit(lambda z, t=tiling: ours.images(z, tiling=t))(scaled), decoded)


def test_flux2s_autoencoder_is_that_of_diffusers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = AutoencoderKLFlux2(
        **LEVELS, latent_channels=4, sample_size=16, decoder_block_out_channels=(8, 16, 16)
    )
    model.bn.running_mean.normal_()
    model.bn.running_var.uniform_(0.2, 2.0)
    model = randomized(model)
    ours: Any = loaded(model, tmp_path)
    x = images(16, 24)
    with torch.no_grad():
        z = model.encode(channels_first(x)).latent_dist.mean
        deviation = torch.sqrt(model.bn.running_var + model.config.batch_norm_eps)
        patches = Flux2Pipeline._patchify_latents(z)
        latents = (patches - model.bn.running_mean.view(1, -1, 1, 1)) / deviation.view(1, -1, 1, 1)
        decoded = model.decode(z).sample
    found = jax.jit(ours.latents)(jnp.asarray(x))
    close(found, latents)
    close(jax.jit(ours.images)(found), decoded)


DC: dict[str, dict[str, Any]] = {
    "shuffle": {"encoder_layers_per_block": (1, 1, 2), "decoder_layers_per_block": (1, 2, 1)},
    "interpolate": {
        "encoder_layers_per_block": (0, 1, 1),
        "decoder_layers_per_block": (0, 1, 1),
        "downsample_block_type": "Conv",
        "upsample_block_type": "interpolate",
        "decoder_act_fns": ("silu", "relu", "silu"),
        "encoder_out_shortcut": False,
        "decoder_in_shortcut": False,
        "decoder_conv_act_fn": "silu",
    },
}


@pytest.mark.parametrize("case", cases("interpolate", of=DC))
def test_dc_autoencoders_are_those_of_diffusers(case: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    kinds = ("ResBlock", "ResBlock", "EfficientViTBlock")
    model = AutoencoderDC(
        latent_channels=4,
        attention_head_dim=4,
        encoder_block_types=kinds,
        decoder_block_types=kinds,
        encoder_block_out_channels=(8, 8, 16),
        decoder_block_out_channels=(8, 8, 16),
        encoder_qkv_multiscales=((), (), (5,)),
        decoder_qkv_multiscales=((), (), (3, 5)),
        scaling_factor=0.4,
        **DC[case],
    )
    model = randomized(model)
    ours: Any = loaded(model, tmp_path)
    x = images(28, 24)
    tilings = (None, Tiling(size=16, overlap=0.25)) if case == "shuffle" else (None,)
    with torch.no_grad():
        for tiling in tilings:
            if tiling is not None:
                model.enable_tiling(16, 16, 12, 12)
            z = model.encode(channels_first(x)).latent
            found = jax.jit(lambda x, t=tiling: ours.latents(x, tiling=t))(jnp.asarray(x))
            close(found, 0.4 * z)
            decoded = jax.jit(lambda z, t=tiling: ours.images(z, tiling=t))(found)
            close(decoded, model.decode(z).sample)
