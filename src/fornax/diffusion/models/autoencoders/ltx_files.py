"""AutoencoderKLLTXVideo of diffusers: its config.json in both directions and its key map."""

from typing import Any

from fornax.config.errors import ConfigError
from fornax.diffusion.models.autoencoders.config import LTXAutoencoderConfig
from fornax.diffusion.models.autoencoders.ltx import LTXAutoencoder
from fornax.diffusion.models.files import Component, Fields
from fornax.diffusion.models.keys import Key

__all__ = ["AUTOENCODER_KL_LTX_VIDEO"]

_BLOCKS = {"block": "LTXVideoDownBlock3D", "resize": "LTXVideo095DownBlock3D"}
"""Their block of an encoder's level, by `widening`."""


def _read(fields: Fields) -> LTXAutoencoderConfig:
    fields.only("patch_size_t", 1)
    channels = tuple(fields.take("block_out_channels", (128, 256, 512, 512)))
    blocks = tuple(fields.take("down_block_types", (_BLOCKS["block"],) * len(channels)))
    kinds = [name for name, block in _BLOCKS.items() if blocks and set(blocks) == {block}]
    if not kinds:
        raise ConfigError(
            f"down_block_types={blocks} is not supported; use one of {', '.join(_BLOCKS.values())} "
            "for all levels"
        )
    levels = len(channels) - (kinds[0] == "resize")
    scaling = tuple(fields.take("spatio_temporal_scaling", (True, True, True, False)))[:levels]
    downs = tuple(fields.take("downsample_type", ("conv",) * levels))[:levels]
    if kinds[0] == "block" and set(downs) != {"conv"}:
        raise ConfigError(
            f"downsample_type={downs} is of {_BLOCKS['resize']}; for {_BLOCKS['block']} use 'conv'"
        )
    ups = tuple(fields.take("decoder_block_out_channels", (128, 256, 512, 512)))
    noise = fields.take("decoder_inject_noise", (False,) * (len(ups) + 1))
    if any(noise):
        raise ConfigError(
            f"decoder_inject_noise={noise} is not supported: noise is added between layers, as in "
            "LTX-Video 0.9.1; use the autoencoder of another version"
        )
    config = LTXAutoencoderConfig(
        in_channels=fields.take("in_channels", 3),
        out_channels=fields.take("out_channels", 3),
        latent_channels=fields.take("latent_channels", 128),
        channels=channels,
        layers=tuple(fields.take("layers_per_block", (4, 3, 3, 3, 4))),
        downsamples=tuple(
            kind if scales else None for kind, scales in zip(downs, scaling, strict=True)
        ),
        widening=kinds[0],  # pyrefly: ignore[bad-argument-type]
        decoder_channels=ups,
        decoder_layers=tuple(fields.take("decoder_layers_per_block", (4, 3, 3, 3, 4))),
        upsamples=tuple(fields.take("decoder_spatio_temporal_scaling", (True, True, True, False))),
        upsample_residual=tuple(fields.take("upsample_residual", (False,) * len(ups))),
        upsample_factor=tuple(fields.take("upsample_factor", (1,) * len(ups))),
        timed=fields.take("timestep_conditioning", False),
        causal=fields.take("encoder_causal", True),
        decoder_causal=fields.take("decoder_causal", False),
        patch=fields.take("patch_size", 4),
        shortcut_eps=fields.take("resnet_norm_eps", 1e-6),
        scale=fields.take("scaling_factor", 1.0),
    )
    for key, found, usual in _ratios(config):
        said = fields.take(key, None)
        if said not in (found, None if found == usual else found):
            raise ConfigError(
                f"{key}={said} does not fit the changes of size, which make it {found}; correct "
                "config.json"
            )
    return config


def _ratios(config: LTXAutoencoderConfig) -> list[tuple[str, int, int]]:
    """Keys of their factors, what these are, and what a file that leaves them out means."""
    usual = 2 ** len(config.ends)
    return [
        ("spatial_compression_ratio", config.factor, config.patch * usual),
        ("temporal_compression_ratio", config.frame_factor, usual),
    ]


def _write(config: LTXAutoencoderConfig) -> dict[str, Any]:
    levels = len(config.downsamples)
    ratios = {key: None if found == usual else found for key, found, usual in _ratios(config)}
    return {
        "in_channels": config.in_channels,
        "out_channels": config.out_channels,
        "latent_channels": config.latent_channels,
        "block_out_channels": list(config.channels),
        "down_block_types": [_BLOCKS[config.widening]] * levels,
        "decoder_block_out_channels": list(config.decoder_channels),
        "layers_per_block": list(config.layers),
        "decoder_layers_per_block": list(config.decoder_layers),
        "spatio_temporal_scaling": [kind is not None for kind in config.downsamples],
        "decoder_spatio_temporal_scaling": list(config.upsamples),
        "decoder_inject_noise": [False] * (len(config.decoder_channels) + 1),
        "downsample_type": [kind or "conv" for kind in config.downsamples],
        "upsample_residual": list(config.upsample_residual),
        "upsample_factor": list(config.upsample_factor),
        "timestep_conditioning": config.timed,
        "patch_size": config.patch,
        "patch_size_t": 1,
        "resnet_norm_eps": config.shortcut_eps,
        "scaling_factor": config.scale,
        "encoder_causal": config.causal,
        "decoder_causal": config.decoder_causal,
        **ratios,
    }


def _block_keys(path: str, name: str) -> list[Key]:
    return [
        Key(f"{path}/conv1/conv", f"{name}.conv1.conv"),
        Key(f"{path}/conv2/conv", f"{name}.conv2.conv"),
        Key(f"{path}/shortcut_norm", f"{name}.norm3"),
        Key(f"{path}/shortcut/conv", f"{name}.conv_shortcut.conv"),
        Key(f"{path}/times/table", f"{name}.scale_shift_table"),
    ]


def _blocks_keys(path: str, name: str, count: int) -> list[Key]:
    keys = _embedder_keys(f"{path}/embedder", f"{name}.time_embedder")
    for index in range(count):
        keys += _block_keys(f"{path}/blocks/{index}", f"{name}.resnets.{index}")
    return keys


def _embedder_keys(path: str, name: str) -> list[Key]:
    return [
        Key(f"{path}/up", f"{name}.timestep_embedder.linear_1"),
        Key(f"{path}/down", f"{name}.timestep_embedder.linear_2"),
    ]


def _keys(config: LTXAutoencoderConfig) -> list[Key]:
    keys = [Key("mean", "latents_mean"), Key("deviation", "latents_std")]
    middles = {"encoder": config.layers[-1], "decoder": config.decoder_layers[-1]}
    for side, count in middles.items():
        for part in ("conv_in", "conv_out"):
            keys.append(Key(f"{side}/{part}/conv", f"{side}.{part}.conv"))
        keys += _blocks_keys(f"{side}/middle", f"{side}.mid_block", count)
    for level, kind in enumerate(config.downsamples):
        path, name = f"encoder/levels/{level}", f"encoder.down_blocks.{level}"
        keys += _blocks_keys(f"{path}/blocks", name, config.layers[level])
        inner = f"{path}/resize/conv" if kind == "conv" else f"{path}/resize/conv/conv"
        theirs = "conv" if kind == "conv" else "conv.conv"
        keys.append(Key(inner, f"{name}.downsamplers.0.{theirs}"))
        keys += _block_keys(f"{path}/widen", f"{name}.conv_out")
    for place, count in enumerate(config.decoder_layers[-2::-1]):
        path, name = f"decoder/levels/{place}", f"decoder.up_blocks.{place}"
        keys += _block_keys(f"{path}/widen", f"{name}.conv_in")
        keys.append(Key(f"{path}/resize/conv/conv", f"{name}.upsamplers.0.conv.conv"))
        keys += _blocks_keys(f"{path}/blocks", name, count)
    keys.append(Key("decoder/times/table", "decoder.scale_shift_table"))
    keys.append(Key("decoder/time_scale", "decoder.timestep_scale_multiplier"))
    return keys + _embedder_keys("decoder/embedder", "decoder.time_embedder")


AUTOENCODER_KL_LTX_VIDEO = Component(
    class_name="AutoencoderKLLTXVideo",
    read=_read,
    write=_write,
    make=LTXAutoencoder,
    keys=_keys,
)
