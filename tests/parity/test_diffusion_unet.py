"""U-Nets and ControlNets beside those of diffusers."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import ControlNetModel, UNet2DConditionModel, UNet2DModel
from diffusers.pipelines.stable_diffusion import StableDiffusionPipeline
from tests.parity.diffusers_cases import SMALL, UNETS, cases
from tests.parity.diffusion_models import channels_first, check_output, loaded, randomized, run

from fornax.diffusion.models import Condition

pytestmark = pytest.mark.parity

RNG = np.random.default_rng(0)
TIMES = np.array([17.0, 999.0], np.float32)


def normal(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


def close(found: jax.Array, want: torch.Tensor) -> None:
    check_output(jnp.moveaxis(found, -1, 1), want)


def condition_of(config: Any) -> tuple[Condition, dict[str, Any]]:
    """What a config asks for, as we take it and as diffusers does."""
    widths = np.atleast_1d(config.encoder_hid_dim or config.cross_attention_dim)
    text = normal(2, 5, widths[0])
    ours: dict[str, Any] = {"text_BSD": text}
    theirs: dict[str, Any] = {"encoder_hidden_states": torch.tensor(text)}
    if config.addition_embed_type is not None:
        pooled, sizes = normal(2, 20), np.array([[64, 48, 0, 3, 64, 32]] * 2, np.float32)
        ours |= {"pooled_BD": pooled, "sizes_BN": sizes}
        added = {"text_embeds": torch.tensor(pooled), "time_ids": torch.tensor(sizes)}
        theirs["added_cond_kwargs"] = added
    if config.get("time_cond_proj_dim") is not None:
        ours["guidance_B"] = np.array([7.5, 2.0], np.float32)
        embed = StableDiffusionPipeline.get_guidance_scale_embedding
        scales = torch.tensor([6.5, 1.0])
        theirs["timestep_cond"] = embed(None, scales, config.time_cond_proj_dim)
    classes: Any = None
    if config.num_class_embeds is not None:
        classes = np.array([3, 6])
    elif config.class_embed_type == "timestep":
        classes = np.array([20, 350])
    elif config.class_embed_type is not None:
        classes = normal(2, 12)
    if classes is not None:
        ours["classes_B"], theirs["class_labels"] = classes, torch.tensor(classes)
    return Condition(**jax.tree.map(jnp.asarray, ours)), theirs


@pytest.mark.parametrize("case", cases("sd2", "sdxl"))
def test_unets_are_those_of_diffusers(case: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = randomized(UNet2DConditionModel(**{**SMALL, **UNETS[case]}))
    unet = loaded(model, tmp_path)
    condition, theirs = condition_of(model.config)
    x = normal(2, 7, 10, model.config.in_channels)
    if case == "projection":
        x = x[:, :6]
    with torch.no_grad():
        want = model(channels_first(x), torch.tensor(TIMES), **theirs).sample
    close(run(unet, x, TIMES, condition), want)


@pytest.mark.exhaustive
def test_unconditional_unets_are_those_of_diffusers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = randomized(
        UNet2DModel(
            block_out_channels=(16, 32),
            norm_num_groups=8,
            layers_per_block=1,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
            attention_head_dim=8,
            num_class_embeds=4,
            resnet_time_scale_shift="scale_shift",
            attn_norm_num_groups=8,
            mid_block_scale_factor=2.0,
        )
    )
    unet = loaded(model, tmp_path)
    x, classes = normal(2, 6, 10, 3), np.array([0, 3])
    with torch.no_grad():
        want = model(channels_first(x), torch.tensor(TIMES), class_labels=torch.tensor(classes))
    condition = Condition(classes_B=jnp.asarray(classes))
    close(run(unet, x, TIMES, condition), want.sample)


@pytest.mark.parametrize("case", ["sdxl", pytest.param("sd1", marks=pytest.mark.exhaustive)])
def test_controlnets_are_those_of_diffusers(case: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    options = {**SMALL, **UNETS[case], "layers_per_block": 1}
    model = UNet2DConditionModel(**options)
    unet: Any = loaded(randomized(model), tmp_path / "unet")
    order = "bgr" if case == "sdxl" else "rgb"
    left = ("up_block_types", "sample_size")
    control = randomized(
        ControlNetModel(
            **{name: value for name, value in options.items() if name not in left},
            conditioning_embedding_out_channels=(4, 8, 8),
            controlnet_conditioning_channel_order=order,
            global_pool_conditions=case == "sdxl",
        )
    )
    ours: Any = loaded(control, tmp_path / "control")
    condition, theirs = condition_of(model.config)
    x, image = normal(2, 8, 6, 4), RNG.uniform(size=(2, 32, 24, 3)).astype(np.float32)
    times = torch.tensor(TIMES)

    @jax.jit
    def both(x: jax.Array, image: jax.Array) -> tuple[tuple[jax.Array, ...], jax.Array]:
        time_B = jnp.asarray(TIMES)
        residuals = ours(x, time_B, image, condition, scale=0.7, guess=case == "sd1")
        return residuals, unet(x, time_B, replace(condition, control=residuals))

    with torch.no_grad():
        down, middle = control(
            channels_first(x),
            times,
            controlnet_cond=channels_first(image),
            conditioning_scale=0.7,
            guess_mode=case == "sd1",
            return_dict=False,
            **theirs,
        )
        want = model(
            channels_first(x),
            times,
            down_block_additional_residuals=down,
            mid_block_additional_residual=middle,
            **theirs,
        ).sample
    residuals, found = both(jnp.asarray(x), jnp.asarray(image))
    for one, other in zip(residuals, (*down, middle), strict=True):
        close(one, other)
    close(found, want)
