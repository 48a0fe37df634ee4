"""The image autoencoders of diffusers: their config.json in both directions and key maps."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from fornax.config.errors import ConfigError
from fornax.diffusion.models.autoencoders.config import DeepCompressionConfig, KLConfig
from fornax.diffusion.models.autoencoders.dc import DeepCompressionAutoencoder
from fornax.diffusion.models.autoencoders.kl import AutoencoderKL
from fornax.diffusion.models.block_keys import image_attention_keys, residual_keys
from fornax.diffusion.models.files import Component, Fields
from fornax.diffusion.models.keys import Key

__all__ = ["AUTOENCODER_DC", "AUTOENCODER_KL", "AUTOENCODER_KL_FLUX2", "kl_keys"]


def _read_common(fields: Fields, channels: Sequence[int], blocks: int, layers: int) -> dict:
    """What both kinds have; the last three are the class's defaults."""
    channels = tuple(fields.take("block_out_channels", channels))
    for side, name in (("down", "DownEncoderBlock2D"), ("up", "UpDecoderBlock2D")):
        found = tuple(fields.take(f"{side}_block_types", (name,) * blocks))
        if found != (name,) * len(channels):
            raise ConfigError(
                f"{side}_block_types={found} is not supported; use {name} for each of "
                f"{len(channels)} block_out_channels"
            )
    act = fields.take("act_fn", "silu")
    size = fields.take("sample_size", 32 if blocks == 1 else 1024)
    return {
        "in_channels": fields.take("in_channels", 3),
        "out_channels": fields.take("out_channels", 3),
        "channels": channels,
        "layers": fields.take("layers_per_block", layers),
        "norm_groups": fields.take("norm_num_groups", 32),
        "activation": "silu" if act == "swish" else act,
        "mid_attention": fields.take("mid_block_add_attention", True),
        "quant_conv": fields.take("use_quant_conv", True),
        "post_quant_conv": fields.take("use_post_quant_conv", True),
        "sample_size": tuple(size) if isinstance(size, list) else size,
    }


def _write_common(config: KLConfig) -> dict[str, Any]:
    levels = len(config.channels)
    return {
        "in_channels": config.in_channels,
        "out_channels": config.out_channels,
        "down_block_types": ["DownEncoderBlock2D"] * levels,
        "up_block_types": ["UpDecoderBlock2D"] * levels,
        "block_out_channels": list(config.channels),
        "layers_per_block": config.layers,
        "act_fn": config.activation,
        "latent_channels": config.latent_channels,
        "norm_num_groups": config.norm_groups,
        "sample_size": config.sample_size,
        "use_quant_conv": config.quant_conv,
        "use_post_quant_conv": config.post_quant_conv,
        "mid_block_add_attention": config.mid_attention,
    }


def _read_kl(fields: Fields) -> KLConfig:
    mean, deviation = fields.take("latents_mean", None), fields.take("latents_std", None)
    return KLConfig(
        **_read_common(fields, (64,), 1, 1),
        latent_channels=fields.take("latent_channels", 4),
        scale=fields.take("scaling_factor", 0.18215),
        shift=fields.take("shift_factor", None),
        mean=None if mean is None else tuple(mean),
        deviation=None if deviation is None else tuple(deviation),
        force_upcast=fields.take("force_upcast", True),
    )


def _write_kl(config: KLConfig) -> dict[str, Any]:
    if config.decoder_channels not in (None, config.channels):
        raise ConfigError(
            f"decoder_channels={config.decoder_channels} differs from channels={config.channels}, "
            "which an AutoencoderKL cannot say; set batch_statistics for FLUX.2's, or use the same"
        )
    return {
        **_write_common(config),
        "scaling_factor": config.scale,
        "shift_factor": config.shift,
        "latents_mean": None if config.mean is None else list(config.mean),
        "latents_std": None if config.deviation is None else list(config.deviation),
        "force_upcast": config.force_upcast,
    }


def _read_flux2(fields: Fields) -> KLConfig:
    decoder = fields.take("decoder_block_out_channels", None)
    fields.ignore("force_upcast")  # in FLUX.2's own file, and not read by its class
    return KLConfig(
        **_read_common(fields, (128, 256, 512, 512), 4, 2),
        decoder_channels=None if decoder is None else tuple(decoder),
        latent_channels=fields.take("latent_channels", 32),
        batch_statistics=True,
        patch=tuple(fields.take("patch_size", (2, 2))),
        statistics_eps=fields.take("batch_norm_eps", 1e-4),
        statistics_momentum=fields.take("batch_norm_momentum", 0.1),
    )


def _write_flux2(config: KLConfig) -> dict[str, Any]:
    decoder = config.decoder_channels
    return {
        **_write_common(config),
        "decoder_block_out_channels": None if decoder is None else list(decoder),
        "patch_size": list(config.patch),
        "batch_norm_eps": config.statistics_eps,
        "batch_norm_momentum": config.statistics_momentum,
    }


def kl_keys(config: KLConfig) -> list[Key]:
    """The key map in diffusers' names."""
    keys = [
        Key("quant", "quant_conv"),
        Key("post_quant", "post_quant_conv"),
        Key("statistics/mean", "bn.running_mean"),
        Key("statistics/variance", "bn.running_var"),
    ]
    sides = (("encoder", "down", "down", config.layers), ("decoder", "up", "up", config.layers + 1))
    for side, blocks, sampler, layers in sides:
        for part, name in (("conv_in", "conv_in"), ("norm", "conv_norm_out")):
            keys.append(Key(f"{side}/{part}", f"{side}.{name}"))
        keys.append(Key(f"{side}/conv_out", f"{side}.conv_out"))
        for index in (0, 1):
            ours, theirs = f"{side}/middle/blocks/{index}", f"{side}.mid_block.resnets.{index}"
            keys += residual_keys(ours, theirs)
        keys += image_attention_keys(f"{side}/middle/attention", f"{side}.mid_block.attentions.0")
        for level in range(len(config.channels)):
            path, name = f"{side}/levels/{level}", f"{side}.{blocks}_blocks.{level}"
            for index in range(layers):
                keys += residual_keys(f"{path}/blocks/{index}", f"{name}.resnets.{index}")
            keys.append(Key(f"{path}/resize/conv", f"{name}.{sampler}samplers.0.conv"))
    return keys


def _read_dc(fields: Fields) -> DeepCompressionConfig:
    found: dict[str, Any] = {}
    widths, windows = (128, 256, 512, 512, 1024, 1024), ((), (), (), (5,), (5,), (5,))
    for side, layers in (("encoder", (2, 2, 2, 3, 3, 3)), ("decoder", (3,) * 6)):
        channels = tuple(fields.take(f"{side}_block_out_channels", widths))
        found[f"{side}_channels"] = channels
        kinds = fields.take(f"{side}_block_types", "ResBlock")
        found[f"{side}_blocks"] = _each(kinds, len(channels))
        found[f"{side}_layers"] = tuple(fields.take(f"{side}_layers_per_block", layers))
        scales = fields.take(f"{side}_qkv_multiscales", windows)
        found[f"{side}_scales"] = tuple(tuple(each) for each in scales)
    stages = len(found["decoder_channels"])
    norms = _each(fields.take("decoder_norm_types", "rms_norm"), stages)
    if set(norms) != {"rms_norm"}:
        raise ConfigError(f"decoder_norm_types={norms} is not supported; use rms_norm")
    for key, allowed in (
        ("upsample_block_type", ("pixel_shuffle", "interpolate")),
        ("downsample_block_type", ("pixel_unshuffle", "conv", "Conv")),
    ):
        fields.only(key, *allowed)
    down = fields.take("downsample_block_type", "pixel_unshuffle")
    return DeepCompressionConfig(
        **found,
        in_channels=fields.take("in_channels", 3),
        latent_channels=fields.take("latent_channels", 32),
        head_dim=fields.take("attention_head_dim", 32),
        upsample=fields.take("upsample_block_type", "pixel_shuffle"),
        downsample="pixel_unshuffle" if down == "pixel_unshuffle" else "conv",
        decoder_activations=_each(fields.take("decoder_act_fns", "silu"), stages),
        encoder_out_shortcut=fields.take("encoder_out_shortcut", True),
        decoder_in_shortcut=fields.take("decoder_in_shortcut", True),
        out_activation=fields.take("decoder_conv_act_fn", "relu"),
        scale=fields.take("scaling_factor", 1.0),
    )


def _each(value: Any, stages: int) -> tuple:
    return (value,) * stages if isinstance(value, str) else tuple(value)


def _one(values: tuple) -> Any:
    return values[0] if len(set(values)) == 1 else list(values)


def _write_dc(config: DeepCompressionConfig) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for side in ("encoder", "decoder"):
        found[f"{side}_block_types"] = _one(getattr(config, f"{side}_blocks"))
        found[f"{side}_block_out_channels"] = list(getattr(config, f"{side}_channels"))
        found[f"{side}_layers_per_block"] = list(getattr(config, f"{side}_layers"))
        found[f"{side}_qkv_multiscales"] = [list(x) for x in getattr(config, f"{side}_scales")]
    return {
        **found,
        "in_channels": config.in_channels,
        "latent_channels": config.latent_channels,
        "attention_head_dim": config.head_dim,
        "upsample_block_type": config.upsample,
        "downsample_block_type": "Conv" if config.downsample == "conv" else config.downsample,
        "decoder_norm_types": "rms_norm",
        "decoder_act_fns": _one(config.decoder_activations),
        "encoder_out_shortcut": config.encoder_out_shortcut,
        "decoder_in_shortcut": config.decoder_in_shortcut,
        "decoder_conv_act_fn": config.out_activation,
        "scaling_factor": config.scale,
    }


def _dc_keys(config: DeepCompressionConfig) -> list[Key]:
    keys = [Key("decoder/norm", "decoder.norm_out")]
    for side, blocks in (("encoder", "down_blocks"), ("decoder", "up_blocks")):
        for end in ("conv_in", "conv_out"):
            keys.append(Key(f"{side}/{end}", f"{side}.{end}"))
            keys.append(Key(f"{side}/{end}/conv", f"{side}.{end}.conv"))
        scales = getattr(config, f"{side}_scales")
        for stage, count in enumerate(getattr(config, f"{side}_layers")):
            for index in range(count + 1):
                ours, theirs = f"{side}/stages/{stage}/parts/{index}", f"{blocks}.{stage}.{index}"
                keys += _part_keys(ours, f"{side}.{theirs}", len(scales[stage]))
    return keys


def _part_keys(path: str, name: str, windows: int) -> list[Key]:
    """Of a residual block, of attention with its gated convolution, or of a change of size: those
    lines that a part has not are passed over."""
    names = {
        "conv1": "conv1",
        "conv2": "conv2",
        "norm": "norm",
        "conv/kernel": "conv.weight",
        "conv/bias": "conv.bias",
        "attention/query": "attn.to_q",
        "attention/key": "attn.to_k",
        "attention/value": "attn.to_v",
        "attention/out": "attn.to_out",
        "attention/norm": "attn.norm_out",
        "conv/inverted": "conv_out.conv_inverted",
        "conv/depth": "conv_out.conv_depth",
        "conv/point": "conv_out.conv_point",
        "conv/norm": "conv_out.norm",
    }
    for index in range(windows):
        names[f"attention/depthwise/{index}"] = f"attn.to_qkv_multiscale.{index}.proj_in"
        names[f"attention/mixing/{index}"] = f"attn.to_qkv_multiscale.{index}.proj_out"
    return [Key(f"{path}/{ours}", f"{name}.{theirs}") for ours, theirs in names.items()]


_OLDER = {
    ".query.": ".to_q.",
    ".key.": ".to_k.",
    ".value.": ".to_v.",
    ".proj_attn.": ".to_out.0.",
}
"""Names of attention in files that older versions of diffusers wrote."""


def _of_today(name: str) -> str:
    for old, new in _OLDER.items():
        name = name.replace(old, new)
    return name


AUTOENCODER_KL = Component(
    class_name="AutoencoderKL",
    read=_read_kl,
    write=_write_kl,
    make=AutoencoderKL,
    keys=kl_keys,
    name=_of_today,
)
AUTOENCODER_KL_FLUX2 = Component(
    class_name="AutoencoderKLFlux2",
    read=_read_flux2,
    write=_write_flux2,
    make=AutoencoderKL,
    keys=kl_keys,
    fixed={"bn.num_batches_tracked": np.zeros((), np.int64)},
)
AUTOENCODER_DC = Component(
    class_name="AutoencoderDC",
    read=_read_dc,
    write=_write_dc,
    make=DeepCompressionAutoencoder,
    keys=_dc_keys,
)
