"""LTX-Video (HaCohen et al. 2024): diffusers' LTXVideoTransformer3DModel."""

from typing import Any

from fornax.config.errors import ConfigError
from fornax.diffusion.models.files import Component, Fields
from fornax.diffusion.models.keys import Key
from fornax.diffusion.models.transformer.config import (
    BlockConfig,
    CrossConfig,
    FractionalRopeConfig,
    HeadConfig,
    NormConfig,
    Run,
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

__all__ = ["LTX_VIDEO"]

_SPANS = (20.0, 2048.0, 2048.0)
"""Seconds, and pixels of height and width, that count as one."""


def _read(fields: Fields) -> TransformerConfig:
    heads, head_dim = fields.take("num_attention_heads", 32), fields.take("attention_head_dim", 64)
    fields.only("qk_norm", "rms_norm_across_heads")
    side = fields.take("patch_size", 1)
    patch = (fields.take("patch_size_t", 1), side, side)
    places = patch[0] * side * side
    channels = fields.take("in_channels", 128)
    out_channels = fields.take("out_channels", 128) or channels
    for key, count in (("in_channels", channels), ("out_channels", out_channels)):
        if count % places:
            raise ConfigError(
                f"{key}={count} is of patches of {places} places and no multiple of that; correct "
                "it, or patch_size and patch_size_t"
            )
    width, across = heads * head_dim, fields.take("cross_attention_dim", 2048)
    if across != width:
        raise ConfigError(
            f"cross_attention_dim={across} must be num_attention_heads * attention_head_dim = "
            f"{width}, to which captions are projected"
        )
    affine, eps = fields.take("norm_elementwise_affine", False), fields.take("norm_eps", 1e-6)
    norm = NormConfig(kind="rms", scale=affine, eps=eps)
    heads_norm = NormConfig(kind="rms", scale=True, eps=1e-5)
    biases = {
        "bias": fields.take("attention_bias", True),
        "out_bias": fields.take("attention_out_bias", True),
    }
    block = BlockConfig(
        modulation="table",
        norm=norm,
        mlp_norm=norm,
        qk_norm=heads_norm,
        across_heads=True,
        cross=CrossConfig(
            num_heads=heads, head_dim=head_dim, qk_norm=heads_norm, across_heads=True, **biases
        ),
        mlp=feed_forward(fields.take("activation_fn", "gelu-approximate"), 4 * width),
        **biases,
    )
    return TransformerConfig(
        class_name="LTXVideoTransformer3DModel",
        channels=channels // places,
        out_channels=out_channels // places,
        patch=patch,
        num_heads=heads,
        head_dim=head_dim,
        blocks=(Run(block=block, count=fields.take("num_layers", 28)),),
        positions=FractionalRopeConfig(spans=_SPANS),
        text=TextConfig(width=fields.take("caption_channels", 4096), projection="mlp"),
        head=HeadConfig(modulation="table"),
    )


def _write(config: TransformerConfig) -> dict[str, Any]:
    (run,), text = config.blocks, config.text
    block, (frames, side, _) = run.block, config.patch
    assert text is not None, "LTX-Video takes text"
    places = frames * side * side
    return {
        "in_channels": config.channels * places,
        "out_channels": config.outputs * places,
        "patch_size": side,
        "patch_size_t": frames,
        "num_attention_heads": config.num_heads,
        "attention_head_dim": config.head_dim,
        "cross_attention_dim": config.width,
        "num_layers": run.count,
        "activation_fn": feed_forward_name(block.mlp),
        "qk_norm": "rms_norm_across_heads",
        "norm_elementwise_affine": block.norm.scale,
        "norm_eps": block.norm.eps,
        "caption_channels": text.width,
        "attention_bias": block.bias,
        "attention_out_bias": block.out_bias,
    }


def _keys(config: TransformerConfig) -> list[Key]:
    block, layers = "transformer_blocks.{}", range(config.num_layers)
    return [
        patch_key("proj_in", config, unfolded=False),
        *embedder_keys("embedder/time", "time_embed.emb.timestep_embedder"),
        Key("shared/0/sample/linear", "time_embed.linear"),
        *embedder_keys("text/projection", "caption_projection"),
        Key("blocks/0/vectors/table/table", f"{block}.scale_shift_table", layers=layers),
        Key("blocks/0/norm", f"{block}.norm1", layers=layers),
        *attention_keys("blocks/0/attention", f"{block}.attn1", layers),
        *attention_keys("blocks/0/cross", f"{block}.attn2", layers),
        Key("blocks/0/mlp_norm", f"{block}.norm2", layers=layers),
        *feed_forward_keys("blocks/0/mlp", f"{block}.ff", layers),
        Key("head/table/table", "scale_shift_table"),
        Key("head/out", "proj_out", patch=config.patch, of_outputs=True),
    ]


LTX_VIDEO = Component(
    class_name="LTXVideoTransformer3DModel",
    read=_read,
    write=_write,
    make=Transformer,
    keys=_keys,
)
