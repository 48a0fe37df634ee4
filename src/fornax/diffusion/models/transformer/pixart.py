"""PixArt alpha and sigma (Chen et al. 2023, 2024): diffusers' PixArtTransformer2DModel."""

from typing import Any

from fornax.config.errors import ConfigError
from fornax.diffusion.models.files import Component, Fields
from fornax.diffusion.models.keys import Key
from fornax.diffusion.models.transformer.config import (
    BlockConfig,
    CrossConfig,
    EmbedderConfig,
    HeadConfig,
    NormConfig,
    Run,
    SinCosConfig,
    TextConfig,
    TransformerConfig,
)
from fornax.diffusion.models.transformer.tables import (
    attention_keys,
    embedder_keys,
    feed_forward,
    feed_forward_keys,
    feed_forward_name,
    patch_key,
)
from fornax.diffusion.models.transformer.transformer import Transformer

__all__ = ["PIXART"]

_SIZED = 128
"""Size of samples from which on sizes are embedded, where a config does not say."""


def _read(fields: Fields) -> TransformerConfig:
    heads, head_dim = fields.take("num_attention_heads", 16), fields.take("attention_head_dim", 72)
    patch, width = fields.take("patch_size", 2), heads * head_dim
    fields.only("dropout", 0.0)
    fields.only("upcast_attention", False)
    fields.only("norm_type", "ada_norm_single")
    fields.only("attention_type", "default")
    fields.ignore("norm_num_groups", "num_embeds_ada_norm")
    affine, size = fields.take("norm_elementwise_affine", False), fields.take("sample_size", _SIZED)
    norm = NormConfig(scale=affine, bias=affine, eps=fields.take("norm_eps", 1e-6))
    bias = fields.take("attention_bias", True)
    scale = fields.take("interpolation_scale", None)
    sized = fields.take("use_additional_conditions", None)
    block = BlockConfig(
        modulation="table",
        norm=norm,
        mlp_norm=norm,
        bias=bias,
        cross=CrossConfig(num_heads=heads, head_dim=head_dim, bias=bias),
        mlp=feed_forward(fields.take("activation_fn", "gelu-approximate"), 4 * width),
    )
    return TransformerConfig(
        class_name="PixArtTransformer2DModel",
        channels=fields.take("in_channels", 4),
        out_channels=fields.take("out_channels", 8),
        patch=(patch, patch),
        sample_size=size,
        num_heads=heads,
        head_dim=head_dim,
        blocks=(Run(block=block, count=fields.take("num_layers", 28)),),
        positions=SinCosConfig(
            base=size // patch, scale=_default_scale(size) if scale is None else scale
        ),
        embedder=EmbedderConfig(sizes=size == _SIZED if sized is None else sized),
        text=_text(fields, width),
        head=HeadConfig(modulation="table"),
    )


def _text(fields: Fields, width: int) -> TextConfig:
    captions = fields.take("caption_channels", None)
    across = fields.take("cross_attention_dim", 1152)
    if across is None:
        raise ConfigError("cross_attention_dim=null is not supported; say how wide text states are")
    if captions is None:
        return TextConfig(width=across, projection="none")
    if across != width:
        raise ConfigError(
            f"cross_attention_dim={across} must be num_attention_heads * attention_head_dim = "
            f"{width}, to which captions are projected"
        )
    return TextConfig(width=captions, projection="mlp")


def _default_scale(size: int) -> int:
    return max(size // 64, 1)


def _write(config: TransformerConfig) -> dict[str, Any]:
    (run,) = config.blocks
    block, positions, text = run.block, config.positions, config.text
    assert isinstance(positions, SinCosConfig), "PixArt adds its positions"
    assert text is not None, "PixArt takes text"
    size, sized = config.sample_size, config.embedder.sizes
    assert size is not None, "PixArt has a size"
    usual = positions.scale == _default_scale(size)
    return {
        "num_attention_heads": config.num_heads,
        "attention_head_dim": config.head_dim,
        "in_channels": config.channels,
        "out_channels": config.out_channels,
        "num_layers": run.count,
        "dropout": 0.0,
        "norm_num_groups": 32,
        "cross_attention_dim": config.text_width,
        "attention_bias": block.bias,
        "sample_size": size,
        "patch_size": config.patch[0],
        "activation_fn": feed_forward_name(block.mlp),
        "num_embeds_ada_norm": 1000,
        "upcast_attention": False,
        "norm_type": "ada_norm_single",
        "norm_elementwise_affine": block.norm.scale,
        "norm_eps": block.norm.eps,
        "interpolation_scale": None if usual else positions.scale,
        "use_additional_conditions": None if sized == (size == _SIZED) else sized,
        "caption_channels": None if text.projection == "none" else text.width,
        "attention_type": "default",
    }


def _keys(config: TransformerConfig) -> list[Key]:
    block, layers = "transformer_blocks.{}", range(config.num_layers)
    return [
        patch_key("pos_embed.proj", config),
        *embedder_keys("embedder/time", "adaln_single.emb.timestep_embedder"),
        *embedder_keys("embedder/resolution", "adaln_single.emb.resolution_embedder"),
        *embedder_keys("embedder/aspect", "adaln_single.emb.aspect_ratio_embedder"),
        Key("shared/0/sample/linear", "adaln_single.linear"),
        *embedder_keys("text/projection", "caption_projection"),
        Key("blocks/0/vectors/table/table", f"{block}.scale_shift_table", layers=layers),
        Key("blocks/0/norm", f"{block}.norm1", layers=layers),
        *attention_keys("blocks/0/attention", f"{block}.attn1", layers),
        *attention_keys("blocks/0/cross", f"{block}.attn2", layers),
        Key("blocks/0/mlp_norm", f"{block}.norm2", layers=layers),
        *feed_forward_keys("blocks/0/mlp", f"{block}.ff", layers),
        Key("head/table/table", "scale_shift_table"),
        Key("head/out", "proj_out"),
    ]


PIXART = Component(
    class_name="PixArtTransformer2DModel",
    read=_read,
    write=_write,
    make=Transformer,
    keys=_keys,
)
