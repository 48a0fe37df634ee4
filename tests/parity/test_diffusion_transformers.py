"""Transformers beside diffusers' own, with tiny random weights, in float32, by folder."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import (
    DiTTransformer2DModel,
    Flux2Transformer2DModel,
    FluxTransformer2DModel,
    OvisImageTransformer2DModel,
    PixArtTransformer2DModel,
    QwenImageTransformer2DModel,
    SanaTransformer2DModel,
    SD3Transformer2DModel,
    ZImageTransformer2DModel,
)
from tests.diffusion_folders import DIT
from tests.parity.diffusion_models import (
    channels_first,
    check_output,
    loaded,
    randomized,
    run,
)

from fornax.diffusion.models import Condition

pytestmark = pytest.mark.parity
RNG = np.random.default_rng(0)
TIMES = np.asarray([3.0, 997.0], np.float32)


DEFAULTS = pytest.param({}, marks=pytest.mark.exhaustive)


def normal(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"out_channels": 8, "patch_size": 1, "attention_bias": False, "activation_fn": "geglu"},
        pytest.param(
            {"norm_elementwise_affine": True, "norm_eps": 1e-3, "activation_fn": "gelu"},
            marks=pytest.mark.exhaustive,
        ),
    ],
)
@torch.no_grad()
def test_dit(options, tmp_path):
    network = randomized(DiTTransformer2DModel(**{**DIT, **options}))
    module = loaded(network, tmp_path)
    x, classes = normal(2, 8, 8, 4), np.asarray([3, 10])
    want = network(
        channels_first(x), torch.from_numpy(TIMES), class_labels=torch.from_numpy(classes)
    ).sample
    found = run(module, x, TIMES, Condition(classes_B=jnp.asarray(classes)))
    check_output(np.moveaxis(np.asarray(found), -1, 1), want)


@pytest.mark.parametrize(
    "options",
    [
        DEFAULTS,
        {"qk_norm": "rms_norm", "dual_attention_layers": (0, 1), "out_channels": 5},
        {"qk_norm": "layer_norm", "num_layers": 1, "patch_size": 1},
    ],
)
@torch.no_grad()
def test_sd3(options, tmp_path):
    config = {
        "sample_size": 8,
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": 4,
        "attention_head_dim": 8,
        "num_attention_heads": 2,
        "joint_attention_dim": 12,
        "caption_projection_dim": 16,
        "pooled_projection_dim": 6,
        "pos_embed_max_size": 12,
    }
    network = randomized(SD3Transformer2DModel(**{**config, **options}))
    module = loaded(network, tmp_path)
    x, text, pooled = normal(2, 8, 6, 4), normal(2, 5, 12), normal(2, 6)
    want = network(
        channels_first(x),
        encoder_hidden_states=torch.from_numpy(text),
        pooled_projections=torch.from_numpy(pooled),
        timestep=torch.from_numpy(TIMES),
    ).sample
    condition = Condition(text_BSD=jnp.asarray(text), pooled_BD=jnp.asarray(pooled))
    check_output(np.moveaxis(np.asarray(run(module, x, TIMES, condition)), -1, 1), want)


def packed(x: np.ndarray) -> torch.Tensor:
    """Latents [B, H, W, C] as their pipelines pack them: [B, patches, C * 2 * 2]."""
    B, H, W, C = x.shape
    x = x.reshape(B, H // 2, 2, W // 2, 2, C).transpose(0, 1, 3, 5, 2, 4)
    return torch.from_numpy(np.ascontiguousarray(x.reshape(B, -1, C * 4)))


def places(rows: int, columns: int, axes: int) -> torch.Tensor:
    """Positions of patches: row and column on axes 1 and 2."""
    ids = torch.zeros(rows, columns, axes)
    ids[..., 1] += torch.arange(rows)[:, None]
    ids[..., 2] += torch.arange(columns)
    return ids.reshape(-1, axes)


@pytest.mark.parametrize("options", [DEFAULTS, {"guidance_embeds": True, "out_channels": 8}])
@torch.no_grad()
def test_flux(options, tmp_path):
    config = {
        "in_channels": 16,
        "num_layers": 2,
        "num_single_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 12,
        "pooled_projection_dim": 6,
        "axes_dims_rope": (4, 6, 6),
    }
    network = randomized(FluxTransformer2DModel(**{**config, **options}))
    module = loaded(network, tmp_path)
    x, text, pooled = normal(2, 8, 6, 4), normal(2, 5, 12), normal(2, 6)
    guidance = np.asarray([3.5, 1.0], np.float32) if options else None
    want = network(
        packed(x),
        encoder_hidden_states=torch.from_numpy(text),
        pooled_projections=torch.from_numpy(pooled),
        timestep=torch.from_numpy(TIMES) / 1000,
        img_ids=places(4, 3, 3),
        txt_ids=torch.zeros(5, 3),
        guidance=None if guidance is None else torch.from_numpy(guidance),
    ).sample
    condition = Condition(
        text_BSD=jnp.asarray(text),
        pooled_BD=jnp.asarray(pooled),
        guidance_B=None if guidance is None else jnp.asarray(guidance),
    )
    found = run(module, x, TIMES, condition)
    check_output(packed(np.asarray(found)).numpy(), want)


@pytest.mark.parametrize("options", [{"out_channels": 8}, {"out_channels": None}])
@torch.no_grad()
def test_ovis_image(options, tmp_path):
    config = {
        "in_channels": 16,
        "num_layers": 2,
        "num_single_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 12,
        "axes_dims_rope": (4, 6, 6),
    }
    network = randomized(OvisImageTransformer2DModel(**{**config, **options}))
    module = loaded(network, tmp_path)
    x, text = normal(2, 8, 6, 4), normal(2, 5, 12)
    text_ids = torch.zeros(5, 3)
    text_ids[:, 1:] = torch.arange(5)[:, None]
    want = network(
        packed(x),
        encoder_hidden_states=torch.from_numpy(text),
        timestep=torch.from_numpy(TIMES) / 1000,
        img_ids=places(4, 3, 3),
        txt_ids=text_ids,
    ).sample
    found = run(module, x, TIMES, Condition(text_BSD=jnp.asarray(text)))
    check_output(packed(np.asarray(found)).numpy(), want)


@pytest.mark.parametrize(
    "options",
    [
        {"caption_channels": 10, "cross_attention_dim": 16},
        {
            "use_additional_conditions": True,
            "num_attention_heads": 3,
            "norm_elementwise_affine": True,
            "interpolation_scale": 2,
            "attention_bias": False,
            "out_channels": 4,
        },
    ],
)
@torch.no_grad()
def test_pixart(options, tmp_path):
    config = {
        "num_attention_heads": 2,
        "attention_head_dim": 8,
        "in_channels": 4,
        "num_layers": 2,
        "sample_size": 8,
        "cross_attention_dim": 10,
    }
    network = randomized(PixArtTransformer2DModel(**{**config, **options}))
    module = loaded(network, tmp_path)
    x, text = normal(2, 8, 6, 4), normal(2, 5, 10)
    mask = np.asarray([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    sizes = np.asarray([[64.0, 48.0, 1.3], [96.0, 32.0, 0.3]], np.float32)
    sized = "use_additional_conditions" in options
    want = network(
        channels_first(x),
        encoder_hidden_states=torch.from_numpy(text),
        encoder_attention_mask=torch.from_numpy(mask),
        timestep=torch.from_numpy(TIMES),
        added_cond_kwargs={
            "resolution": torch.from_numpy(sizes[:, :2]) if sized else None,
            "aspect_ratio": torch.from_numpy(sizes[:, 2:]) if sized else None,
        },
    ).sample
    condition = Condition(
        text_BSD=jnp.asarray(text),
        text_mask_BS=jnp.asarray(mask),
        sizes_BN=jnp.asarray(sizes) if sized else None,
    )
    check_output(np.moveaxis(np.asarray(run(module, x, TIMES, condition)), -1, 1), want)


@pytest.mark.parametrize("masked", [pytest.param(False, marks=pytest.mark.exhaustive), True])
@torch.no_grad()
def test_qwen_image(masked, tmp_path):
    network = QwenImageTransformer2DModel(
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=12,
        axes_dims_rope=(4, 6, 6),
    )
    module = loaded(randomized(network), tmp_path)
    x, text = normal(2, 10, 6, 4), normal(2, 5, 12)
    mask = np.asarray([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]) if masked else None
    want = network(
        packed(x),
        encoder_hidden_states=torch.from_numpy(text),
        encoder_hidden_states_mask=None if mask is None else torch.from_numpy(mask),
        timestep=torch.from_numpy(TIMES) / 1000,
        img_shapes=[[(1, 5, 3)]] * 2,
    ).sample
    condition = Condition(
        text_BSD=jnp.asarray(text), text_mask_BS=None if mask is None else jnp.asarray(mask)
    )
    check_output(packed(np.asarray(run(module, x, TIMES, condition))).numpy(), want)


@pytest.mark.parametrize("options", [{}, {"guidance_embeds": False, "out_channels": 4}])
@torch.no_grad()
def test_flux2(options, tmp_path):
    config = {
        "in_channels": 8,
        "num_layers": 2,
        "num_single_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 12,
        "timestep_guidance_channels": 32,
        "axes_dims_rope": (4, 4, 4, 4),
    }
    network = randomized(Flux2Transformer2DModel(**{**config, **options}))
    module = loaded(network, tmp_path)
    x, text = normal(2, 4, 3, 8), normal(2, 5, 12)
    guidance = None if options else np.asarray([3.5, 1.0], np.float32)
    text_ids = torch.zeros(5, 4)
    text_ids[:, 3] = torch.arange(5)
    want = network(
        torch.from_numpy(x.reshape(2, 12, 8)),
        encoder_hidden_states=torch.from_numpy(text),
        timestep=torch.from_numpy(TIMES) / 1000,
        img_ids=places(4, 3, 4),
        txt_ids=text_ids,
        guidance=None if guidance is None else torch.from_numpy(guidance),
    ).sample
    condition = Condition(
        text_BSD=jnp.asarray(text),
        guidance_B=None if guidance is None else jnp.asarray(guidance),
    )
    check_output(np.asarray(run(module, x, TIMES, condition)).reshape(2, 12, -1), want)


@pytest.mark.parametrize(
    "options",
    [{}, {"n_refiner_layers": 1, "qk_norm": False, "all_patch_size": (1,), "t_scale": 900.0}],
)
@torch.no_grad()
def test_z_image(options, tmp_path):
    config = {
        "in_channels": 4,
        "dim": 32,
        "n_layers": 2,
        "n_heads": 2,
        "n_kv_heads": 2,
        "cap_feat_dim": 12,
        "axes_dims": (4, 6, 6),
        "axes_lens": (128, 16, 16),
    }
    network = randomized(ZImageTransformer2DModel(**{**config, **options}))
    module = loaded(network, tmp_path)
    # Texts of different lengths are filled up to 32 and to 64, so that samples stand elsewhere.
    lengths = (33, 7)
    x, text = normal(2, 8, 6, 4), normal(2, 33, 12)
    mask = np.arange(33) < np.asarray(lengths)[:, None]
    want = network(
        [channels_first(x)[i][:, None] for i in range(2)],
        1 - torch.from_numpy(TIMES) / 1000,
        [torch.from_numpy(text[i, : lengths[i]]) for i in range(2)],
        patch_size=options.get("all_patch_size", (2,))[0],
    ).sample
    condition = Condition(text_BSD=jnp.asarray(text), text_mask_BS=jnp.asarray(mask, jnp.int32))
    found = np.moveaxis(np.asarray(run(module, x, TIMES, condition)), -1, 1)
    check_output(-found, torch.stack(want)[:, :, 0])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {
            "guidance_embeds": True,
            "qk_norm": "rms_norm_across_heads",
            "norm_elementwise_affine": True,
            "attention_bias": True,
            "interpolation_scale": 2,
            "patch_size": 2,
            "timestep_scale": 0.5,
        },
    ],
)
@torch.no_grad()
def test_sana(options, tmp_path):
    config = {
        "in_channels": 4,
        "out_channels": 4,
        "num_attention_heads": 2,
        "attention_head_dim": 8,
        "num_layers": 2,
        "num_cross_attention_heads": 3,
        "cross_attention_head_dim": 4,
        "cross_attention_dim": 16,
        "caption_channels": 10,
        "sample_size": 8,
    }
    network = randomized(SanaTransformer2DModel(**{**config, **options}))
    module = loaded(network, tmp_path)
    x, text = normal(2, 8, 6, 4), normal(2, 5, 10)
    mask = np.asarray([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    guidance = np.asarray([4.5, 1.0], np.float32) if options else None
    want = network(
        channels_first(x),
        encoder_hidden_states=torch.from_numpy(text),
        encoder_attention_mask=torch.from_numpy(mask),
        timestep=torch.from_numpy(TIMES) * options.get("timestep_scale", 1.0),
        guidance=None if guidance is None else torch.from_numpy(guidance) * 0.1,
    ).sample
    condition = Condition(
        text_BSD=jnp.asarray(text),
        text_mask_BS=jnp.asarray(mask),
        guidance_B=None if guidance is None else jnp.asarray(guidance),
    )
    check_output(np.moveaxis(np.asarray(run(module, x, TIMES, condition)), -1, 1), want)
