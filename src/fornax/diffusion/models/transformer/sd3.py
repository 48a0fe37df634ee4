"""Stable Diffusion 3 (Esser et al. 2024): diffusers' SD3Transformer2DModel."""

import itertools
from typing import Any

from fornax.config.errors import ConfigError
from fornax.diffusion.models.files import Component, Fields
from fornax.diffusion.models.keys import Key
from fornax.diffusion.models.transformer.config import (
    BlockConfig,
    EmbedderConfig,
    MLPConfig,
    Run,
    SinCosConfig,
    TextConfig,
    TransformerConfig,
)
from fornax.diffusion.models.transformer.tables import (
    attention_keys,
    embedder_keys,
    feed_forward_keys,
    joint_attention_keys,
    patch_key,
    qk_norm,
    qk_norm_name,
    run_layers,
)
from fornax.diffusion.models.transformer.transformer import Transformer

__all__ = ["SD3"]


def _read(fields: Fields) -> TransformerConfig:
    heads, head_dim = fields.take("num_attention_heads", 18), fields.take("attention_head_dim", 64)
    patch, channels = fields.take("patch_size", 2), fields.take("in_channels", 16)
    width, layers = heads * head_dim, fields.take("num_layers", 18)
    caption = fields.take("caption_projection_dim", 1152)
    if caption != width:
        raise ConfigError(
            f"caption_projection_dim={caption} must be num_attention_heads * attention_head_dim = "
            f"{width}, since text and sample attend as one sequence"
        )
    size = fields.take("sample_size", 128)
    dual = fields.take("dual_attention_layers", ())
    norm = qk_norm(fields.take("qk_norm", None), 1e-6)
    kinds = [
        BlockConfig(
            kind="joint",
            qk_norm=norm,
            mlp=MLPConfig(hidden=4 * width),
            second_attention=layer in dual,
            text_ends=layer == layers - 1,
        )
        for layer in range(layers)
    ]
    runs = [Run(block=kind, count=len(list(alike))) for kind, alike in itertools.groupby(kinds)]
    return TransformerConfig(
        class_name="SD3Transformer2DModel",
        channels=channels,
        out_channels=fields.take("out_channels", 16),
        patch=(patch, patch),
        sample_size=size,
        num_heads=heads,
        head_dim=head_dim,
        blocks=tuple(runs),
        positions=SinCosConfig(
            base=size // patch,
            stored=fields.take("pos_embed_max_size", 96),
        ),
        embedder=EmbedderConfig(pooled=fields.take("pooled_projection_dim", 2048)),
        text=TextConfig(width=fields.take("joint_attention_dim", 4096)),
    )


def _write(config: TransformerConfig) -> dict[str, Any]:
    positions, text = config.positions, config.text
    assert isinstance(positions, SinCosConfig), "SD3 adds its positions"
    assert text is not None, "SD3 takes text"
    layers = zip(config.blocks, run_layers(config), strict=True)
    return {
        "sample_size": config.sample_size,
        "patch_size": config.patch[0],
        "in_channels": config.channels,
        "num_layers": config.num_layers,
        "attention_head_dim": config.head_dim,
        "num_attention_heads": config.num_heads,
        "joint_attention_dim": text.width,
        "caption_projection_dim": config.width,
        "pooled_projection_dim": config.embedder.pooled,
        "out_channels": config.out_channels,
        "pos_embed_max_size": positions.stored,
        "dual_attention_layers": [
            layer for run, numbers in layers for layer in numbers if run.block.second_attention
        ],
        "qk_norm": qk_norm_name(config.blocks[0].block.qk_norm),
    }


def _keys(config: TransformerConfig) -> list[Key]:
    keys = [
        Key("table", "pos_embed.pos_embed", leading=1),
        patch_key("pos_embed.proj", config),
        *embedder_keys("embedder/time", "time_text_embed.timestep_embedder"),
        *embedder_keys("embedder/pooled", "time_text_embed.text_embedder"),
        Key("text/projection", "context_embedder"),
    ]
    block = "transformer_blocks.{}"
    for index, (run, layers) in enumerate(zip(config.blocks, run_layers(config), strict=True)):
        path = f"blocks/{index}"
        keys += [
            Key(f"{path}/sample/vectors/projection/linear", f"{block}.norm1.linear", layers=layers),
            Key(
                f"{path}/text/vectors/projection/linear",
                f"{block}.norm1_context.linear",
                layers=layers,
                order=(1, 0) if run.block.text_ends else (),
            ),
            *joint_attention_keys(path, f"{block}.attn", layers),
            *attention_keys(f"{path}/sample/second", f"{block}.attn2", layers),
            *feed_forward_keys(f"{path}/sample/mlp", f"{block}.ff", layers),
            *feed_forward_keys(f"{path}/text/mlp", f"{block}.ff_context", layers),
        ]
    return [
        *keys,
        Key("head/modulation/linear", "norm_out.linear", order=(1, 0)),
        Key("head/out", "proj_out"),
    ]


SD3 = Component(
    class_name="SD3Transformer2DModel",
    read=_read,
    write=_write,
    make=Transformer,
    keys=_keys,
)
