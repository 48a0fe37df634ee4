"""The U-Nets and ControlNets of diffusers: their config.json in both directions and key maps."""

from collections.abc import Sequence
from typing import Any

from fornax.config.errors import ConfigError
from fornax.diffusion.models.block_keys import image_attention_keys, residual_keys
from fornax.diffusion.models.files import Component, Fields
from fornax.diffusion.models.keys import Key
from fornax.diffusion.models.unet.config import (
    ClassEmbedding,
    ControlNetConfig,
    LevelAttention,
    UNetConfig,
)
from fornax.diffusion.models.unet.control import ControlNet
from fornax.diffusion.models.unet.network import UNet

__all__ = ["CONTROLNET", "UNET_2D", "UNET_2D_CONDITION", "unet_keys"]

_DOWN: dict[LevelAttention, str] = {
    "none": "DownBlock2D",
    "cross": "CrossAttnDownBlock2D",
    "self": "AttnDownBlock2D",
}
_UP: dict[LevelAttention, str] = {
    "none": "UpBlock2D",
    "cross": "CrossAttnUpBlock2D",
    "self": "AttnUpBlock2D",
}
_CLASSES: dict[ClassEmbedding, str] = {
    "timestep": "timestep",
    "identity": "identity",
    "projection": "projection",
    "linear": "simple_projection",
}
_ACTIVATIONS = {"swish": "silu"}
"""Other names that files have."""
_FIXED: dict[str, Any] = {
    "num_attention_heads": None,
    "addition_embed_type_num_heads": 64,
    "attention_type": "default",
    "cross_attention_norm": None,
    "dropout": 0.0,
    "dual_cross_attention": False,
    "mid_block_only_cross_attention": None,
    "resnet_out_scale_factor": 1.0,
    "resnet_skip_time_act": False,
    "time_embedding_type": "positional",
}
"""What is written of options that have one value here."""
_FIXED_2D: dict[str, Any] = {
    "add_attention": True,
    "downsample_type": "conv",
    "dropout": 0.0,
    "num_train_timesteps": None,
    "time_embedding_type": "positional",
    "upsample_type": "conv",
}


def _each(value: Any, levels: int) -> tuple:
    """A value for each level, of one or a list."""
    return tuple(value) if isinstance(value, list | tuple) else (value,) * levels


def _one(values: Sequence) -> Any:
    """One value where all are equal, else a list."""
    return values[0] if all(value == values[0] for value in values) else list(values)


def _kinds(
    fields: Fields, key: str, default: Sequence[str], names: dict[LevelAttention, str], allowed: str
) -> tuple[LevelAttention, ...]:
    """The attention of each level, of names of blocks."""
    kinds = {name: kind for kind, name in names.items() if kind in ("none", allowed)}
    found = tuple(fields.take(key, default))
    for name in found:
        if name not in kinds:
            raise ConfigError(
                f"{key} has {name!r}, which is not supported; use {' or '.join(kinds)}"
            )
    return tuple(kinds[name] for name in found)


def _activation(name: str | None) -> Any:
    return _ACTIVATIONS.get(name, name) if name is not None else None


def _read_common(fields: Fields) -> dict[str, Any]:
    """What U-Nets of all kinds and ControlNets have."""
    fields.only("num_attention_heads", None)
    fields.only("dropout", 0.0)
    fields.only("time_embedding_type", "positional")
    channels = tuple(fields.take("block_out_channels", (320, 640, 1280, 1280)))
    shift = fields.take("resnet_time_scale_shift", "default")
    if shift not in ("default", "scale_shift"):
        raise ConfigError(
            f"resnet_time_scale_shift={shift!r} is not supported; use 'default' or 'scale_shift'"
        )
    time_dim = fields.take("time_embedding_dim", None)
    return {
        "channels": channels,
        "in_channels": fields.take("in_channels", 4),
        "layers": _each(fields.take("layers_per_block", 2), len(channels)),
        "activation": _activation(fields.take("act_fn", "silu")),
        "norm_groups": fields.take("norm_num_groups", 32),
        "norm_eps": fields.take("norm_eps", 1e-5),
        "scale_shift": shift == "scale_shift",
        "mid_scale": fields.take("mid_block_scale_factor", 1),
        "downsample_padding": fields.take("downsample_padding", 1),
        "flip_sin_to_cos": fields.take("flip_sin_to_cos", True),
        "freq_shift": fields.take("freq_shift", 0),
        "time_dim": 4 * channels[0] if time_dim is None else time_dim,
        **_read_classes(fields),
    }


def _read_classes(fields: Fields) -> dict[str, Any]:
    kinds = {name: kind for kind, name in _CLASSES.items()}
    kind, rows = fields.take("class_embed_type", None), fields.take("num_class_embeds", None)
    if kind is not None and kind not in kinds:
        raise ConfigError(
            f"class_embed_type={kind!r} is not supported; use one of {', '.join(kinds)}, or null"
        )
    if kind is not None:
        return {"class_embedding": kinds[kind]}
    return {"class_embedding": "none" if rows is None else "table", "classes": rows}


def _write_common(config: UNetConfig) -> dict[str, Any]:
    return {
        "block_out_channels": list(config.channels),
        "in_channels": config.in_channels,
        "layers_per_block": _one(config.layers),
        "act_fn": config.activation,
        "norm_num_groups": config.norm_groups,
        "norm_eps": config.norm_eps,
        "resnet_time_scale_shift": "scale_shift" if config.scale_shift else "default",
        "mid_block_scale_factor": config.mid_scale,
        "downsample_padding": config.downsample_padding,
        "flip_sin_to_cos": config.flip_sin_to_cos,
        "freq_shift": config.freq_shift,
        "class_embed_type": _CLASSES.get(config.class_embedding),
        "num_class_embeds": config.classes,
        "down_block_types": [_DOWN[kind] for kind in config.down_attention],
    }


def _read_text(fields: Fields, levels: int) -> dict[str, Any]:
    """What U-Nets that attend to text have, and their ControlNets."""
    fields.only("attention_type", "default")
    fields.ignore("addition_embed_type_num_heads")  # of an embedding that is refused
    fields.only("encoder_hid_dim_type", None, "text_proj")
    fields.only("addition_embed_type", None, "text_time")
    sized = fields.take("addition_embed_type", None) is not None
    size_dim = fields.take("addition_time_embed_dim", None)
    default = ("CrossAttnDownBlock2D",) * 3 + ("DownBlock2D",)
    kinds: dict[str | None, LevelAttention | None]
    kinds = {"UNetMidBlock2DCrossAttn": "cross", "UNetMidBlock2D": "none", None: None}
    fields.only("mid_block_type", "UNetMidBlock2DCrossAttn", "UNetMidBlock2D", None)
    layers = _each(fields.take("transformer_layers_per_block", 1), levels)
    return {
        "down_attention": _kinds(fields, "down_block_types", default, _DOWN, "cross"),
        "mid_attention": kinds[fields.take("mid_block_type", "UNetMidBlock2DCrossAttn")],
        "heads": _each(fields.take("attention_head_dim", 8), levels),
        "text_dims": _each(fields.take("cross_attention_dim", 1280), levels),
        "transformer_layers": layers,
        "only_cross_attention": _each(fields.take("only_cross_attention", False), levels),
        "linear_projection": fields.take("use_linear_projection", False),
        "upcast_attention": fields.take("upcast_attention", False),
        "projection_dim": fields.take("projection_class_embeddings_input_dim", None),
        "size_dim": size_dim if sized else None,
        "text_input_dim": fields.take("encoder_hid_dim", None),
    }


def _write_text(config: UNetConfig) -> dict[str, Any]:
    mid = {"cross": "UNetMidBlock2DCrossAttn", "none": "UNetMidBlock2D"}
    return {
        "mid_block_type": None if config.mid_attention is None else mid[config.mid_attention],
        "attention_head_dim": _one(config.heads),
        "cross_attention_dim": _one(config.text_dims),
        "transformer_layers_per_block": _one([_one(each) for each in config.transformer_layers]),
        "only_cross_attention": _one(config.only_cross_attention),
        "use_linear_projection": config.linear_projection,
        "upcast_attention": config.upcast_attention,
        "projection_class_embeddings_input_dim": config.projection_dim,
        "addition_embed_type": None if config.size_dim is None else "text_time",
        "addition_time_embed_dim": config.size_dim,
        "encoder_hid_dim": config.text_input_dim,
        "encoder_hid_dim_type": None if config.text_input_dim is None else "text_proj",
    }


def _transformers(
    down: Sequence, layers: Sequence[int], up: Sequence | None
) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
    """Transformer blocks of every residual block down and up."""
    ups = tuple(reversed(down)) if up is None else up
    return (
        tuple(_each(each, count) for each, count in zip(down, layers, strict=True)),
        tuple(_each(each, n + 1) for each, n in zip(ups, reversed(layers), strict=True)),
    )


def _read_condition(fields: Fields) -> UNetConfig:
    for key in ("dual_cross_attention", "resnet_skip_time_act"):
        fields.only(key, False)
    fields.only("resnet_out_scale_factor", 1.0)
    fields.only("mid_block_only_cross_attention", None, False)
    fields.only("cross_attention_norm", None)
    found = _read_common(fields)
    found |= _read_text(fields, len(found["channels"]))
    up = fields.take("reverse_transformer_layers_per_block", None)
    down = found["transformer_layers"]
    found["transformer_layers"], ups = _transformers(down, found["layers"], up)
    default = ("UpBlock2D",) + ("CrossAttnUpBlock2D",) * 3
    config = UNetConfig(
        **found,
        up_transformer_layers=ups,
        out_channels=fields.take("out_channels", 4),
        sample_size=_size(fields.take("sample_size", None)),
        center_input=fields.take("center_input_sample", False),
        up_attention=_kinds(fields, "up_block_types", default, _UP, "cross"),
        conv_in_kernel=fields.take("conv_in_kernel", 3),
        conv_out_kernel=fields.take("conv_out_kernel", 3),
        time_activation=_activation(fields.take("time_embedding_act_fn", None)),
        time_post_activation=_activation(fields.take("timestep_post_act", None)),
        time_condition_dim=fields.take("time_cond_proj_dim", None),
        class_concat=fields.take("class_embeddings_concat", False),
    )
    if not config.takes_text:
        raise ConfigError(
            "a UNet2DConditionModel without a block that attends to text is not supported; name "
            "one CrossAttnDownBlock2D, or use a UNet2DModel"
        )
    return config


def _write_condition(config: UNetConfig) -> dict[str, Any]:
    down = [_one(each) for each in config.transformer_layers]
    derived = all(isinstance(each, int) for each in down) and (
        _transformers(down, config.layers, None)[1] == config.up_transformer_layers
    )
    return {
        **_FIXED,
        **_write_common(config),
        **_write_text(config),
        "reverse_transformer_layers_per_block": None
        if derived
        else [_one(each) for each in config.up_transformer_layers],
        "out_channels": config.out_channels,
        "sample_size": config.sample_size,
        "center_input_sample": config.center_input,
        "up_block_types": [_UP[kind] for kind in config.up_attention],
        "conv_in_kernel": config.conv_in_kernel,
        "conv_out_kernel": config.conv_out_kernel,
        "time_embedding_dim": None
        if config.time_dim == 4 * config.channels[0]
        else config.time_dim,
        "time_embedding_act_fn": config.time_activation,
        "timestep_post_act": config.time_post_activation,
        "time_cond_proj_dim": config.time_condition_dim,
        "class_embeddings_concat": config.class_concat,
    }


def _size(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _read_2d(fields: Fields) -> UNetConfig:
    fields.only("add_attention", True)
    fields.only("downsample_type", "conv")
    fields.only("upsample_type", "conv")
    fields.only("act_fn", "silu", "swish")
    fields.only("mid_block_type", "UNetMidBlock2D", None)
    fields.ignore("num_train_timesteps")  # of a learned embedding of the time, which is refused
    found = _read_common(fields)
    channels = tuple(fields.take("block_out_channels", (224, 448, 672, 896)))
    levels = len(channels)
    width = fields.take("attention_head_dim", 8)
    groups = fields.take("attn_norm_num_groups", None)
    wanted = (found["norm_groups"],) if found["scale_shift"] else (None, found["norm_groups"])
    if groups not in wanted:
        raise ConfigError(
            f"attn_norm_num_groups={groups} is not supported with norm_num_groups="
            f"{found['norm_groups']} and scale_shift={found['scale_shift']}; use {wanted[0]}"
        )
    down = ("DownBlock2D",) + ("AttnDownBlock2D",) * 3
    up = ("AttnUpBlock2D",) * 3 + ("UpBlock2D",)
    layers = found["layers"] = (found["layers"][0],) * levels
    found |= {
        "channels": channels,
        "time_dim": fields.take("time_embedding_dim", None) or 4 * channels[0],
        "in_channels": fields.take("in_channels", 3),
    }
    return UNetConfig(
        **found,
        out_channels=fields.take("out_channels", 3),
        sample_size=_size(fields.take("sample_size", None)),
        center_input=fields.take("center_input_sample", False),
        heads=tuple(1 if width is None else each // width for each in channels),
        down_attention=_kinds(fields, "down_block_types", down, _DOWN, "self"),
        mid_attention="self" if fields.take("mid_block_type", "UNetMidBlock2D") else None,
        up_attention=_kinds(fields, "up_block_types", up, _UP, "self"),
        text_dims=(0,) * levels,
        transformer_layers=tuple((1,) * count for count in layers),
        up_transformer_layers=tuple((1,) * (count + 1) for count in reversed(layers)),
        only_cross_attention=(False,) * levels,
    )


def _write_2d(config: UNetConfig) -> dict[str, Any]:
    widths = {c // n for c, n in zip(config.channels, config.heads, strict=True)}
    if len(widths) > 1 and set(config.heads) != {1}:
        raise ConfigError(
            f"heads={config.heads} of channels={config.channels} have several widths, and a "
            "UNet2DModel has one; use heads of one width, or one head everywhere"
        )
    groups = config.norm_groups if config.scale_shift else None
    return {
        **_FIXED_2D,
        **_write_common(config),
        "out_channels": config.out_channels,
        "sample_size": config.sample_size,
        "center_input_sample": config.center_input,
        "up_block_types": [_UP[kind] for kind in config.up_attention],
        "mid_block_type": None if config.mid_attention is None else "UNetMidBlock2D",
        "attention_head_dim": widths.pop() if len(widths) == 1 else None,
        "attn_norm_num_groups": groups,
        "time_embedding_dim": None
        if config.time_dim == 4 * config.channels[0]
        else config.time_dim,
    }


def _read_control(fields: Fields) -> ControlNetConfig:
    found = _read_common(fields)
    found |= _read_text(fields, len(found["channels"]))
    layers, down = found["layers"], found["transformer_layers"]
    found["transformer_layers"], ups = _transformers(down, layers, None)
    fields.only("controlnet_conditioning_channel_order", "rgb", "bgr")
    up = tuple(reversed(found["down_attention"]))
    return ControlNetConfig(
        unet=UNetConfig(**found, up_transformer_layers=ups, up_attention=up),
        image_channels=fields.take("conditioning_channels", 3),
        image_order=fields.take("controlnet_conditioning_channel_order", "rgb"),
        image_widths=tuple(
            fields.take("conditioning_embedding_out_channels", None) or (16, 32, 96, 256)
        ),
        pool=fields.take("global_pool_conditions", False),
    )


def _write_control(config: ControlNetConfig) -> dict[str, Any]:
    return {
        **_write_common(config.unet),
        **_write_text(config.unet),
        "num_attention_heads": None,
        "addition_embed_type_num_heads": 64,
        "conditioning_channels": config.image_channels,
        "controlnet_conditioning_channel_order": config.image_order,
        "conditioning_embedding_out_channels": list(config.image_widths),
        "global_pool_conditions": config.pool,
    }


def _base_keys(config: UNetConfig) -> list[Key]:
    """What comes before the levels."""
    return [
        Key("conv_in", "conv_in"),
        *_mlp("embedding/time", "time_embedding"),
        Key("embedding/guidance", "time_embedding.cond_proj"),
        Key("embedding/classes", "class_embedding"),
        *_mlp("embedding/classes", "class_embedding"),
        *_mlp("embedding/sizes", "add_embedding"),
        Key("text", "encoder_hid_proj"),
    ]


def _mlp(path: str, name: str) -> list[Key]:
    return [Key(f"{path}/up", f"{name}.linear_1"), Key(f"{path}/down", f"{name}.linear_2")]


def _down_keys(config: UNetConfig) -> list[Key]:
    keys: list[Key] = []
    for level, layers in enumerate(config.transformer_layers):
        path, name = f"down/{level}", f"down_blocks.{level}"
        keys += _level_keys(path, name, config, config.down_attention[level], layers)
        keys.append(Key(f"{path}/down/conv", f"{name}.downsamplers.0.conv"))
    kind, layers = config.mid_attention or "none", config.transformer_layers[-1][:1]
    return keys + _level_keys("middle", "mid_block", config, kind, layers, blocks=2)


def _level_keys(
    path: str,
    name: str,
    config: UNetConfig,
    kind: LevelAttention,
    layers: Sequence[int],
    *,
    blocks: int | None = None,
) -> list[Key]:
    keys: list[Key] = []
    for index in range(len(layers) if blocks is None else blocks):
        keys += residual_keys(f"{path}/blocks/{index}", f"{name}.resnets.{index}")
    for index, count in enumerate(layers):
        ours, theirs = f"{path}/attentions/{index}", f"{name}.attentions.{index}"
        if kind == "cross":
            keys += _transformer_keys(ours, theirs, count, config.linear_projection)
        elif kind == "self":
            keys += image_attention_keys(ours, theirs)
    return keys


def _transformer_keys(path: str, name: str, count: int, linear: bool) -> list[Key]:
    places = 0 if linear else 2
    keys = [Key(f"{path}/norm", f"{name}.norm")]
    for ours, theirs in (("project_in", "proj_in"), ("project_out", "proj_out")):
        kernel = Key(f"{path}/{ours}/kernel", f"{name}.{theirs}.weight", trailing=places)
        keys += [kernel, Key(f"{path}/{ours}/bias", f"{name}.{theirs}.bias")]
    stack = {
        "norm1": "norm1",
        "norm2": "norm2",
        "norm3": "norm3",
        "mlp/up": "ff.net.0.proj",
        "mlp/gate": "ff.net.0.proj",
        "mlp/down": "ff.net.2",
    }
    for number in (1, 2):
        for ours, theirs in (("query", "q"), ("key", "k"), ("value", "v"), ("out", "out.0")):
            stack[f"attention{number}/{ours}"] = f"attn{number}.to_{theirs}"
    return keys + [
        Key(
            f"{path}/blocks/{ours}", f"{name}.transformer_blocks.{{}}.{theirs}", layers=range(count)
        )
        for ours, theirs in stack.items()
    ]


def unet_keys(config: UNetConfig) -> list[Key]:
    """The key map of a U-Net in diffusers' names."""
    keys = _base_keys(config) + _down_keys(config)
    for index, layers in enumerate(config.up_transformer_layers):
        path, name = f"up/{index}", f"up_blocks.{index}"
        keys += _level_keys(path, name, config, config.up_attention[index], layers)
        keys.append(Key(f"{path}/up/conv", f"{name}.upsamplers.0.conv"))
    return [*keys, Key("norm", "conv_norm_out"), Key("conv_out", "conv_out")]


def _control_keys(config: ControlNetConfig) -> list[Key]:
    name = "controlnet_cond_embedding"
    keys = _base_keys(config.unet) + _down_keys(config.unet)
    keys += [Key("reader/first", f"{name}.conv_in"), Key("reader/last", f"{name}.conv_out")]
    for index in range(2 * (len(config.image_widths) - 1)):
        keys.append(Key(f"reader/blocks/{index}", f"{name}.blocks.{index}"))
    passed = sum(config.unet.layers) + len(config.unet.layers)
    for index in range(passed):
        keys.append(Key(f"across/{index}", f"controlnet_down_blocks.{index}"))
    return [*keys, Key(f"across/{passed}", "controlnet_mid_block")]


UNET_2D_CONDITION = Component(
    class_name="UNet2DConditionModel",
    read=_read_condition,
    write=_write_condition,
    make=UNet,
    keys=unet_keys,
)
UNET_2D = Component(
    class_name="UNet2DModel", read=_read_2d, write=_write_2d, make=UNet, keys=unet_keys
)
CONTROLNET = Component(
    class_name="ControlNetModel",
    read=_read_control,
    write=_write_control,
    make=ControlNet,
    keys=_control_keys,
)
