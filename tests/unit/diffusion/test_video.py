"""Autoencoders of videos: chunks of frames beside the whole, causality, and what is refused."""

import functools
import json

import jax.numpy as jnp
import numpy as np
import pytest

from fornax.config.errors import ConfigError
from fornax.diffusion.models import create, load_component, save_component
from fornax.diffusion.models.autoencoders import (
    AUTOENCODER_KL_LTX_VIDEO,
    AUTOENCODER_KL_WAN,
    LTXAutoencoder,
    LTXAutoencoderConfig,
    Tiling,
    WanAutoencoder,
    WanAutoencoderConfig,
)

CONFIG = WanAutoencoderConfig(
    channels=4,
    multipliers=(1, 2),
    layers=1,
    temporal=(True,),
    latent_channels=2,
    mean=(0.5, -0.5),
    deviation=(2.0, 4.0),
)
RESIDUAL = WanAutoencoderConfig(
    **{
        **vars(CONFIG),
        "multipliers": (2, 2),
        "residual": True,
        "patch": 2,
        "in_channels": 12,
        "out_channels": 12,
    }
)
VIDEO = np.random.default_rng(0).uniform(-1, 1, (1, 7, 16, 8, 3)).astype(np.float32)


@functools.cache
def autoencoder(config: WanAutoencoderConfig) -> WanAutoencoder:
    return create(AUTOENCODER_KL_WAN, config)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "chunk"),
    [(CONFIG, 3), (RESIDUAL, 2)],
    ids=["plain", "residual"],
)
def test_chunks_of_frames_are_the_whole(config, chunk):
    """The first of four frames of z alone, then chunks; of two, one frame is left."""
    model = autoencoder(config)
    whole = model.encode(VIDEO, chunk=None).mean_BHWC
    assert whole.shape == (1, 4, 16 // config.factor, 8 // config.factor, 2)
    assert np.std(whole) > 0.01
    decoded = model.decode(whole, chunk=None)
    assert decoded.shape == VIDEO.shape
    np.testing.assert_allclose(model.encode(VIDEO, chunk=chunk).mean_BHWC, whole, atol=1e-5)
    np.testing.assert_allclose(model.decode(whole, chunk=chunk), decoded, atol=1e-5)


def test_frames_do_not_see_those_after_them():
    model = autoencoder(CONFIG)
    z = np.asarray(model.encode(VIDEO, chunk=None).mean_BHWC)
    other = VIDEO.copy()
    other[:, 5:] *= -1
    changed = np.array(model.encode(other, chunk=None).mean_BHWC)
    np.testing.assert_allclose(changed[:, :3], z[:, :3], atol=1e-6)
    assert np.abs(changed[:, 3] - z[:, 3]).max() > 1e-3
    changed[:, :3], changed[:, 3] = z[:, :3], -z[:, 3]
    before, after = (np.asarray(model.decode(each, chunk=None)) for each in (z, changed))
    np.testing.assert_allclose(after[:, :5], before[:, :5], atol=1e-6)
    assert np.abs(after[:, 5:] - before[:, 5:]).max() > 1e-3


def test_latents_are_scaled_once():
    model = autoencoder(CONFIG)
    z = model.encode(VIDEO, chunk=None).mean_BHWC
    latents = model.latents(VIDEO, chunk=None)
    np.testing.assert_allclose(latents, (z - np.float32([0.5, -0.5])) / np.float32([2, 4]), 1e-5)
    np.testing.assert_allclose(
        model.videos(latents, chunk=None), model.decode(z, chunk=None), atol=1e-5
    )


@pytest.mark.slow
def test_tiles_cover_a_video():
    """Where a tile is the whole, nothing changes; elsewhere sizes stay, and values near edges."""
    model = autoencoder(CONFIG)
    image = VIDEO[:, :1]  # an image is a video of one frame
    z = model.encode(image).mean_BHWC
    decoded = model.decode(z)
    assert decoded.shape == image.shape
    np.testing.assert_array_equal(model.decode(z, tiling=Tiling(size=16)), decoded)
    tiled = model.decode(z, tiling=Tiling(size=8, overlap=0.5))
    assert tiled.shape == decoded.shape
    assert model.encode(image, tiling=Tiling(size=8, overlap=0.5)).mean_BHWC.shape == z.shape


def test_bytes_and_config_survive_a_round_trip(tmp_path):
    model = autoencoder(CONFIG)
    save_component(model, tmp_path / "wan")
    again = load_component(tmp_path / "wan")
    assert again.config == model.config
    save_component(again, tmp_path / "again")
    first, second = (
        (tmp_path / name / "diffusion_pytorch_model.safetensors").read_bytes()
        for name in ("wan", "again")
    )
    assert first == second


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (lambda model: model.encode(VIDEO[:, :6]), r"1 \+ 2 k frames"),
        (lambda model: model.encode(VIDEO[:, :, :15]), "multiples of 2"),
        (lambda model: model.encode(VIDEO[..., :1]), r"\[B, F, H, W, 3\]"),
        (lambda model: model.encode(VIDEO[0]), "does not fit"),
        (lambda model: model.encode(VIDEO, chunk=0), "chunk=0"),
        (lambda model: model.decode(jnp.zeros((1, 2, 4, 4, 3))), r"\[B, F, H, W, 2\]"),
    ],
)
def test_what_an_autoencoder_refuses(run, said):
    with pytest.raises(ConfigError, match=said):
        run(autoencoder(CONFIG))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"temporal": ()}, "temporal"),
        ({"residual": True}, "must end in two that are equal"),
        ({"mean": (0.0,)}, "mean has 1 values"),
        ({"class_name": "AutoencoderKLQwenImage", "patch": 2}, "store it as AutoencoderKLWan"),
    ],
)
def test_configs_that_make_no_sense(changes, said):
    with pytest.raises(ConfigError, match=said):
        WanAutoencoderConfig(**{**vars(CONFIG), **changes})


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"scale_factor_spatial": 16}, "scale_factor_spatial=16"),
        ({"attn_scales": [1.0]}, "attn_scales"),
        ({"_class_name": "WanTransformer3DModel", "image_dim": 1280}, "image_dim=1280"),
        ({"_class_name": "WanTransformer3DModel", "pos_embed_seq_len": 514}, "pos_embed_seq_len"),
        ({"_class_name": "AutoencoderKLLTXVideo", "decoder_inject_noise": [True]}, "inject_noise"),
        ({"_class_name": "LTXVideoTransformer3DModel", "cross_attention_dim": 9}, "must be"),
    ],
)
def test_folders_that_are_refused(keys, said, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"_class_name": "AutoencoderKLWan", **keys}))
    with pytest.raises(ConfigError, match=said):
        load_component(tmp_path)


LTX = LTXAutoencoderConfig(
    latent_channels=2,
    channels=(4,),
    layers=(1, 1),
    downsamples=("conv",),
    decoder_channels=(4,),
    decoder_layers=(1, 1),
    upsamples=(True,),
    upsample_residual=(False,),
    upsample_factor=(1,),
    patch=2,
)


@functools.cache
def ltx_autoencoder() -> LTXAutoencoder:
    return create(AUTOENCODER_KL_LTX_VIDEO, LTX)


@pytest.mark.slow
def test_an_encoder_sees_no_later_frames_and_a_decoder_does():
    """LTX-Video's; tiles keep the size, and where a tile is the whole nothing changes."""
    model = ltx_autoencoder()
    z = np.asarray(model.encode(VIDEO).mean_BHWC)
    assert z.shape == (1, 4, 4, 2, 2)
    other = VIDEO.copy()
    other[:, 5:] *= -1
    changed = np.array(model.encode(other).mean_BHWC)
    np.testing.assert_allclose(changed[:, :3], z[:, :3], atol=1e-6)
    changed[:, :3], changed[:, 3] = z[:, :3], -z[:, 3]
    before, after = (np.asarray(model.decode(each)) for each in (z, changed))
    assert before.shape == VIDEO.shape
    assert np.abs(after[:, 3:5] - before[:, 3:5]).max() > 1e-4
    np.testing.assert_array_equal(model.decode(z, tiling=Tiling(size=16)), before)
    assert model.decode(z, tiling=Tiling(size=8, overlap=0.5)).shape == VIDEO.shape


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (lambda model: model.encode(VIDEO[:, :6]), r"1 \+ 2 k frames"),
        (lambda model: model.encode(VIDEO[:, :, :14]), "multiples of 4"),
        (lambda model: model.decode(jnp.zeros((1, 2, 4, 4, 3))), r"\[B, F, H, W, 2\]"),
        (lambda model: model.decode(jnp.zeros((1, 2, 4, 4, 2)), jnp.zeros(1)), "takes no time"),
    ],
)
def test_what_the_autoencoder_of_ltx_video_refuses(run, said):
    with pytest.raises(ConfigError, match=said):
        run(ltx_autoencoder())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"layers": (1,)}, "layers="),
        ({"downsamples": ("spatial",)}, "frames 1 times smaller"),
        ({"upsamples": (False,)}, "larger"),
        (
            {
                "decoder_channels": (4, 8),
                "decoder_layers": (1, 1, 1),
                "upsamples": (True, False),
                "upsample_residual": (False, False),
                "upsample_factor": (1, 1),
                "timed": True,
            },
            "change from 8 to 4",
        ),
    ],
)
def test_configs_of_ltx_video_that_make_no_sense(changes, said):
    with pytest.raises(ConfigError, match=said):
        LTXAutoencoderConfig(**{**vars(LTX), **changes})
