"""The video autoencoders of diffusers: their config.json in both directions and key maps."""

from typing import Any

from fornax.config.errors import ConfigError
from fornax.diffusion.models.autoencoders.hunyuan import (
    HunyuanAutoencoder,
    HunyuanAutoencoderConfig,
)
from fornax.diffusion.models.autoencoders.wan import WanAutoencoder, WanAutoencoderConfig
from fornax.diffusion.models.block_keys import image_attention_keys
from fornax.diffusion.models.files import Component, Fields
from fornax.diffusion.models.keys import Key

__all__ = [
    "AUTOENCODER_KL_HUNYUAN_VIDEO",
    "AUTOENCODER_KL_QWEN_IMAGE",
    "AUTOENCODER_KL_WAN",
]

_MEAN = (
    *(-0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508),
    *(0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921),
)
_DEVIATION = (
    *(2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743),
    *(3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160),
)
"""Of Wan 2.1's latents: what files that leave them out mean."""


def _read_shared(fields: Fields) -> dict[str, Any]:
    fields.ignore("dropout")
    fields.only("attn_scales", [])  # diffusers' encoders fail with any
    return {
        "channels": fields.take("base_dim", 96),
        "multipliers": tuple(fields.take("dim_mult", (1, 2, 4, 4))),
        "layers": fields.take("num_res_blocks", 2),
        "temporal": tuple(fields.take("temperal_downsample", (False, True, True))),
        "latent_channels": fields.take("z_dim", 16),
        "mean": tuple(fields.take("latents_mean", _MEAN)),
        "deviation": tuple(fields.take("latents_std", _DEVIATION)),
    }


def _write_shared(config: WanAutoencoderConfig) -> dict[str, Any]:
    width = config.latent_channels
    return {
        "base_dim": config.channels,
        "z_dim": width,
        "dim_mult": list(config.multipliers),
        "num_res_blocks": config.layers,
        "attn_scales": [],
        "temperal_downsample": list(config.temporal),
        "dropout": 0.0,
        "latents_mean": list(config.mean or (0.0,) * width),
        "latents_std": list(config.deviation or (1.0,) * width),
    }


def _read_wan(fields: Fields) -> WanAutoencoderConfig:
    config = WanAutoencoderConfig(
        **_read_shared(fields),
        in_channels=fields.take("in_channels", 3),
        out_channels=fields.take("out_channels", 3),
        decoder_channels=fields.take("decoder_base_dim", None),
        residual=fields.take("is_residual", False),
        patch=fields.take("patch_size", None),
    )
    for key, default, found in (
        ("scale_factor_temporal", 4, config.frame_factor),
        ("scale_factor_spatial", 8, config.factor),
    ):
        said = fields.take(key, default)
        if said != found:
            raise ConfigError(
                f"{key}={said} does not fit dim_mult, temperal_downsample and patch_size, which "
                f"make it {found}; correct config.json"
            )
    return config


def _write_wan(config: WanAutoencoderConfig) -> dict[str, Any]:
    return {
        **_write_shared(config),
        "decoder_base_dim": config.decoder_channels,
        "is_residual": config.residual,
        "in_channels": config.in_channels,
        "out_channels": config.out_channels,
        "patch_size": config.patch,
        "scale_factor_temporal": config.frame_factor,
        "scale_factor_spatial": config.factor,
    }


def _read_qwen(fields: Fields) -> WanAutoencoderConfig:
    channels = fields.take("input_channels", 3)
    return WanAutoencoderConfig(
        **_read_shared(fields),
        in_channels=channels,
        out_channels=channels,
        class_name="AutoencoderKLQwenImage",
    )


def _write_qwen(config: WanAutoencoderConfig) -> dict[str, Any]:
    return {**_write_shared(config), "input_channels": config.in_channels}


def _block_keys(path: str, name: str) -> list[Key]:
    return [
        Key(f"{path}/norm1/scale", f"{name}.norm1.gamma", trailing=3),
        Key(f"{path}/conv1/conv", f"{name}.conv1"),
        Key(f"{path}/norm2/scale", f"{name}.norm2.gamma", trailing=3),
        Key(f"{path}/conv2/conv", f"{name}.conv2"),
        Key(f"{path}/shortcut/conv", f"{name}.conv_shortcut"),
    ]


def _attention_keys(path: str, name: str) -> list[Key]:
    """Of products that are convolutions of one place in the files."""
    keys = [Key(f"{path}/norm/scale", f"{name}.norm.gamma", trailing=2)]
    parts = [(part, "to_qkv") for part in ("query", "key", "value")] + [("out", "proj")]
    for part, theirs in parts:
        keys.append(Key(f"{path}/{part}/kernel", f"{name}.{theirs}.weight", trailing=2))
        keys.append(Key(f"{path}/{part}/bias", f"{name}.{theirs}.bias"))
    return keys


def _resize_keys(path: str, name: str) -> list[Key]:
    return [
        Key(f"{path}/resize/conv", f"{name}.resample.1"),
        Key(f"{path}/resize/time", f"{name}.time_conv"),
        Key(f"{path}/resize/time/conv", f"{name}.time_conv"),
    ]


def _wan_keys(config: WanAutoencoderConfig) -> list[Key]:
    keys = [Key("quant/conv", "quant_conv"), Key("post_quant/conv", "post_quant_conv")]
    for side in ("encoder", "decoder"):
        for part in ("conv_in", "conv_out"):
            keys.append(Key(f"{side}/{part}/conv", f"{side}.{part}"))
        keys.append(Key(f"{side}/norm/scale", f"{side}.norm_out.gamma", trailing=3))
        middle = f"{side}.mid_block"
        keys += _attention_keys(f"{side}/middle/attention", f"{middle}.attentions.0")
        for index in range(2):
            keys += _block_keys(f"{side}/middle/blocks/{index}", f"{middle}.resnets.{index}")
    for level in range(len(config.multipliers)):
        path, name = f"decoder/levels/{level}", f"decoder.up_blocks.{level}"
        for index in range(config.layers + 1):
            keys += _block_keys(f"{path}/blocks/{index}", f"{name}.resnets.{index}")
        keys += _resize_keys(path, f"{name}.{'upsampler' if config.residual else 'upsamplers.0'}")
    return keys + (_nested(config) if config.residual else _flat(config))


def _nested(config: WanAutoencoderConfig) -> list[Key]:
    """The encoder's levels as blocks of their own."""
    keys: list[Key] = []
    for level in range(len(config.multipliers)):
        path, name = f"encoder/levels/{level}", f"encoder.down_blocks.{level}"
        for index in range(config.layers):
            keys += _block_keys(f"{path}/blocks/{index}", f"{name}.resnets.{index}")
        keys += _resize_keys(path, f"{name}.downsampler")
    return keys


def _flat(config: WanAutoencoderConfig) -> list[Key]:
    """The encoder's parts of all levels in one list."""
    keys: list[Key] = []
    number = 0
    for level in range(len(config.multipliers)):
        path = f"encoder/levels/{level}"
        for index in range(config.layers):
            keys += _block_keys(f"{path}/blocks/{index}", f"encoder.down_blocks.{number}")
            number += 1
        keys += _resize_keys(path, f"encoder.down_blocks.{number}")
        number += 1
    return keys


AUTOENCODER_KL_WAN = Component(
    class_name="AutoencoderKLWan",
    read=_read_wan,
    write=_write_wan,
    make=WanAutoencoder,
    keys=_wan_keys,
)
AUTOENCODER_KL_QWEN_IMAGE = Component(
    class_name="AutoencoderKLQwenImage",
    read=_read_qwen,
    write=_write_qwen,
    make=WanAutoencoder,
    keys=_wan_keys,
)


def _read_hunyuan(fields: Fields) -> HunyuanAutoencoderConfig:
    channels = tuple(fields.take("block_out_channels", (128, 256, 512, 512)))
    for side in ("Down", "Up"):
        kinds = [f"HunyuanVideo{side}Block3D"] * len(channels)
        fields.only(f"{side.lower()}_block_types", kinds)
    fields.only("act_fn", "silu", "swish")
    fields.only("temporal_compression_ratio", 4)
    return HunyuanAutoencoderConfig(
        in_channels=fields.take("in_channels", 3),
        out_channels=fields.take("out_channels", 3),
        channels=channels,
        layers=fields.take("layers_per_block", 2),
        latent_channels=fields.take("latent_channels", 16),
        norm_groups=fields.take("norm_num_groups", 32),
        mid_attention=fields.take("mid_block_add_attention", True),
        scale=fields.take("scaling_factor", 0.476986),
        factor=fields.take("spatial_compression_ratio", 8),
    )


def _write_hunyuan(config: HunyuanAutoencoderConfig) -> dict[str, Any]:
    levels = len(config.channels)
    return {
        "in_channels": config.in_channels,
        "out_channels": config.out_channels,
        "latent_channels": config.latent_channels,
        "down_block_types": ["HunyuanVideoDownBlock3D"] * levels,
        "up_block_types": ["HunyuanVideoUpBlock3D"] * levels,
        "block_out_channels": list(config.channels),
        "layers_per_block": config.layers,
        "act_fn": "silu",
        "norm_num_groups": config.norm_groups,
        "scaling_factor": config.scale,
        "spatial_compression_ratio": config.factor,
        "temporal_compression_ratio": config.frame_factor,
        "mid_block_add_attention": config.mid_attention,
    }


def _hunyuan_block_keys(path: str, name: str) -> list[Key]:
    return [
        Key(f"{path}/norm1", f"{name}.norm1"),
        Key(f"{path}/conv1/conv", f"{name}.conv1.conv"),
        Key(f"{path}/norm2", f"{name}.norm2"),
        Key(f"{path}/conv2/conv", f"{name}.conv2.conv"),
        Key(f"{path}/shortcut", f"{name}.conv_shortcut.conv"),
    ]


def _hunyuan_keys(config: HunyuanAutoencoderConfig) -> list[Key]:
    keys = [Key("quant", "quant_conv"), Key("post_quant", "post_quant_conv")]
    for side, way, layers in (
        ("encoder", "down", config.layers),
        ("decoder", "up", config.layers + 1),
    ):
        for part in ("conv_in", "conv_out"):
            keys.append(Key(f"{side}/{part}/conv", f"{side}.{part}.conv"))
        keys.append(Key(f"{side}/norm", f"{side}.conv_norm_out"))
        middle = f"{side}.mid_block"
        keys += image_attention_keys(f"{side}/middle/attention", f"{middle}.attentions.0")
        for index in range(2):
            path, name = f"{side}/middle/blocks/{index}", f"{middle}.resnets.{index}"
            keys += _hunyuan_block_keys(path, name)
        for level in range(len(config.channels)):
            path, name = f"{side}/levels/{level}", f"{side}.{way}_blocks.{level}"
            for index in range(layers):
                keys += _hunyuan_block_keys(f"{path}/blocks/{index}", f"{name}.resnets.{index}")
            resize = f"{name}.{way}samplers.0.conv.conv"
            keys.append(Key(f"{path}/resize/conv", resize))
            keys.append(Key(f"{path}/resize/conv/conv", resize))
    return keys


AUTOENCODER_KL_HUNYUAN_VIDEO = Component(
    class_name="AutoencoderKLHunyuanVideo",
    read=_read_hunyuan,
    write=_write_hunyuan,
    make=HunyuanAutoencoder,
    keys=_hunyuan_keys,
)
