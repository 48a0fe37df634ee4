"""Single files of the original code: U-Nets and autoencoders of Stable Diffusion 1.x, 2.x and XL.

Such a file has no config: which model it is follows from its tensors, or the caller gives a config.
The key map is diffusers' with its names translated.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fornax.checkpoint.safetensors_file import DTYPES, StoredTensor, open_file
from fornax.config.errors import CheckpointError, ConfigError
from fornax.diffusion.models import files
from fornax.diffusion.models.autoencoders.components import AUTOENCODER_KL, kl_keys
from fornax.diffusion.models.autoencoders.config import KLConfig
from fornax.diffusion.models.autoencoders.kl import AutoencoderKL
from fornax.diffusion.models.keys import Key
from fornax.diffusion.models.unet.components import UNET_2D_CONDITION, unet_keys
from fornax.diffusion.models.unet.config import UNetConfig
from fornax.diffusion.models.unet.network import UNet

__all__ = [
    "KLS",
    "UNETS",
    "load_original_autoencoder",
    "load_original_unet",
    "original_kl_keys",
    "original_unet_keys",
]

_UNET = "model.diffusion_model."
_KL = "first_stage_model."

SD1 = UNetConfig(text_dims=(768,) * 4)
SD2 = UNetConfig(heads=(5, 10, 20, 20), text_dims=(1024,) * 4, linear_projection=True)
SDXL = UNetConfig(
    channels=(320, 640, 1280),
    layers=(2, 2, 2),
    down_attention=("none", "cross", "cross"),
    up_attention=("cross", "cross", "none"),
    heads=(5, 10, 20),
    text_dims=(2048,) * 3,
    transformer_layers=((1, 1), (2, 2), (10, 10)),
    up_transformer_layers=((10,) * 3, (2,) * 3, (1,) * 3),
    only_cross_attention=(False,) * 3,
    linear_projection=True,
    size_dim=256,
    projection_dim=2816,
)
UNETS: Mapping[int, UNetConfig] = {768: SD1, 1024: SD2, 2048: SDXL}
"""By the width of the text states."""
KLS: Mapping[tuple[int, bool], KLConfig] = {
    (4, False): KLConfig(scale=0.18215, force_upcast=True),
    (4, True): KLConfig(scale=0.13025, sample_size=1024, force_upcast=True),
}
"""By latent channels, and whether the file is of SDXL."""


def load_original_unet(
    file: str | Path, *, config: UNetConfig | None = None, **options: Any
) -> UNet:
    """The U-Net of a single file.

    Args:
      file: safetensors, with the names of the original code.
      config: what it is; None for what the tensors show: SD 1.x, 2.x or XL.
      **options: `dtype`, `compute_dtype`, `mesh` and `rules`, as of `files.load`.

    Raises:
      CheckpointError: no U-Net in the file, tensors that are missing, unknown or of another shape,
        or a damaged file.
      ConfigError: what the tensors show is not known and no config was given.
    """
    path = Path(file)
    own = _under(_UNET, _opened(path), path)
    config = _unet_of(own, path) if config is None else config
    keys = original_unet_keys(config)
    return files.load_tensors(UNET_2D_CONDITION, config, own, path, keys=keys, **options)


def load_original_autoencoder(
    file: str | Path, *, config: KLConfig | None = None, **options: Any
) -> AutoencoderKL:
    """The autoencoder of a single file, or with a config of one that holds nothing else; arguments
    and errors are as of `load_original_unet`."""
    path = Path(file)
    stored = _opened(path)
    alone = "decoder.conv_in.weight" in stored
    if alone and config is None:
        raise ConfigError(
            f"{path} holds an autoencoder alone, and those of Stable Diffusion 1 and XL differ in "
            "their scale, which is in no tensor; give config=KLS[4, False], or KLS[4, True] for XL"
        )
    own = _under("" if alone else _KL, stored, path)
    xl = any(name.startswith("conditioner.") for name in stored)
    config = _kl_of(own, xl, path) if config is None else config
    keys = original_kl_keys(config)
    return files.load_tensors(AUTOENCODER_KL, config, own, path, keys=keys, **options)


def _opened(path: Path) -> dict[str, StoredTensor]:
    if not path.is_file():
        raise CheckpointError(f"{path} is not a file; give one safetensors file")
    return open_file(path, DTYPES)  # text encoders have int64 positions


def _under(prefix: str, stored: Mapping[str, StoredTensor], path: Path) -> dict[str, StoredTensor]:
    """The tensors whose names have a beginning, without it."""
    own = {n.removeprefix(prefix): one for n, one in stored.items() if n.startswith(prefix)}
    if not own:
        raise CheckpointError(
            f"{path} has no tensor whose name begins with {prefix}; load a diffusers folder with "
            "load_component, or give a file of the original code"
        )
    for name, tensor in own.items():
        files.check_dtype(f"{prefix}{name}", tensor)
    return own


def _unet_of(own: Mapping[str, StoredTensor], path: Path) -> UNetConfig:
    ends = ".1.transformer_blocks.0.attn2.to_k.weight"
    widths = {tensor.shape[-1] for name, tensor in own.items() if name.endswith(ends)}
    width = widths.pop() if len(widths) == 1 else 0
    first, last = own.get("input_blocks.0.0.weight"), own.get("out.2.weight")
    if width not in UNETS or first is None or last is None:
        raise ConfigError(
            f"{path}: a U-Net with text of width {width} is none of "
            f"{', '.join(map(str, UNETS))}; give its config"
        )
    return replace(UNETS[width], in_channels=first.shape[1], out_channels=last.shape[0])


def _kl_of(own: Mapping[str, StoredTensor], xl: bool, path: Path) -> KLConfig:
    first = own.get("decoder.conv_in.weight")
    latent = 0 if first is None else first.shape[1]
    if (latent, xl) not in KLS:
        raise ConfigError(
            f"{path}: an autoencoder with {latent} latent channels is not known, and its scale "
            "is in no tensor; give its config"
        )
    return KLS[latent, xl]


def _translated(keys: list[Key], names: Mapping[str, str]) -> list[Key]:
    """The table with the longest matching beginning of each name replaced."""
    found = []
    for key in keys:
        starts = [name for name in names if key.name == name or key.name.startswith(f"{name}.")]
        if not starts:
            raise ConfigError(f"{key.name} has no name in the original code; save it as diffusers")
        start = max(starts, key=len)
        found.append(replace(key, name=names[start] + key.name[len(start) :]))
    return found


_RESIDUAL = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}


def original_unet_keys(config: UNetConfig) -> list[Key]:
    """The key map of a U-Net in the original code's names, without their common beginning."""
    names = {
        "conv_in": "input_blocks.0.0",
        "time_embedding.linear_1": "time_embed.0",
        "time_embedding.linear_2": "time_embed.2",
        "time_embedding.cond_proj": "time_embed.cond_proj",
        "class_embedding": "label_emb",
        "class_embedding.linear_1": "label_emb.0.0",
        "class_embedding.linear_2": "label_emb.0.2",
        "add_embedding.linear_1": "label_emb.0.0",
        "add_embedding.linear_2": "label_emb.0.2",
        "encoder_hid_proj": "encoder_hid_proj",
        "conv_norm_out": "out.0",
        "conv_out": "out.2",
    }

    def block(theirs: str, ours: str, index: int, attention: str) -> None:
        for end, name in _RESIDUAL.items():
            names[f"{ours}.resnets.{index}.{end}"] = f"{theirs}.0.{name}"
        names[f"{ours}.attentions.{index}"] = attention

    number = 1
    for level, layers in enumerate(config.layers):
        for index in range(layers):
            block(
                f"input_blocks.{number}", f"down_blocks.{level}", index, f"input_blocks.{number}.1"
            )
            number += 1
        names[f"down_blocks.{level}.downsamplers.0.conv"] = f"input_blocks.{number}.0.op"
        number += level < len(config.layers) - 1
    for index in (0, 1):
        for end, name in _RESIDUAL.items():
            names[f"mid_block.resnets.{index}.{end}"] = f"middle_block.{2 * index}.{name}"
    names["mid_block.attentions.0"] = "middle_block.1"
    number = 0
    for up, layers in enumerate(reversed(config.layers)):
        for index in range(layers + 1):
            block(f"output_blocks.{number}", f"up_blocks.{up}", index, f"output_blocks.{number}.1")
            number += 1
        place = 1 if config.up_attention[up] == "none" else 2
        names[f"up_blocks.{up}.upsamplers.0.conv"] = f"output_blocks.{number - 1}.{place}.conv"
    return _translated(unet_keys(config), names)


def original_kl_keys(config: KLConfig) -> list[Key]:
    """The key map of an autoencoder in the original code's names; its attention is stored as 1x1
    convolutions."""
    names = {"quant_conv": "quant_conv", "post_quant_conv": "post_quant_conv", "bn": "bn"}
    levels = len(config.channels)
    for side, blocks, sampler in (("encoder", "down", "down"), ("decoder", "up", "up")):
        for end, name in (("conv_in", "conv_in"), ("conv_out", "conv_out")):
            names[f"{side}.{end}"] = f"{side}.{name}"
        names[f"{side}.conv_norm_out"] = f"{side}.norm_out"
        places = {
            f"{side}.mid_block.resnets.{index}": f"{side}.mid.block_{index + 1}" for index in (0, 1)
        }
        for level in range(levels):
            # The original's decoder numbers levels as the encoder, from the whole image down.
            own = level if side == "encoder" else levels - 1 - level
            theirs, ours = f"{side}.{blocks}.{own}", f"{side}.{blocks}_blocks.{level}"
            for index in range(config.layers + 1):
                places[f"{ours}.resnets.{index}"] = f"{theirs}.block.{index}"
            names[f"{ours}.{sampler}samplers.0"] = f"{theirs}.{sampler}sample"
        for place, name in places.items():
            for part in ("norm1", "conv1", "norm2", "conv2", "time_emb_proj"):
                names[f"{place}.{part}"] = f"{name}.{part}"
            names[f"{place}.conv_shortcut"] = f"{name}.nin_shortcut"
        middle = f"{side}.mid_block.attentions.0"
        parts = {
            "to_q": "q",
            "to_k": "k",
            "to_v": "v",
            "to_out.0": "proj_out",
            "group_norm": "norm",
        }
        for end, name in parts.items():
            names[f"{middle}.{end}"] = f"{side}.mid.attn_1.{name}"
    keys = []
    for key in kl_keys(config):
        if "mid_block.attentions" in key.name and not key.name.endswith("group_norm"):
            keys.append(
                replace(key, path=f"{key.path}/kernel", name=f"{key.name}.weight", trailing=2)
            )
            keys.append(replace(key, path=f"{key.path}/bias", name=f"{key.name}.bias"))
        else:
            keys.append(key)
    return _translated(keys, names)
