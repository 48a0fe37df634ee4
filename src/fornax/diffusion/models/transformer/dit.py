"""DiT (Peebles and Xie 2023): diffusers' DiTTransformer2DModel."""

from typing import Any

from fornax.diffusion.models.files import Component, Fields
from fornax.diffusion.models.keys import Key
from fornax.diffusion.models.transformer.config import (
    BlockConfig,
    EmbedderConfig,
    NormConfig,
    Run,
    SinCosConfig,
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

__all__ = ["DIT"]


def _read(fields: Fields) -> TransformerConfig:
    heads, head_dim = fields.take("num_attention_heads", 16), fields.take("attention_head_dim", 72)
    patch, channels = fields.take("patch_size", 2), fields.take("in_channels", 4)
    fields.only("dropout", 0.0)
    fields.only("upcast_attention", False)
    fields.only("norm_type", "ada_norm_zero")
    fields.ignore("norm_num_groups")
    size = fields.take("sample_size", 32)
    affine = fields.take("norm_elementwise_affine", False)
    eps = fields.take("norm_eps", 1e-5)
    block = BlockConfig(
        own_embedder=True,
        bias=fields.take("attention_bias", True),
        mlp_norm=NormConfig(scale=affine, bias=affine, eps=eps),
        mlp=feed_forward(fields.take("activation_fn", "gelu-approximate"), 4 * heads * head_dim),
    )
    return TransformerConfig(
        class_name="DiTTransformer2DModel",
        channels=channels,
        out_channels=fields.take("out_channels", None),
        patch=(patch, patch),
        sample_size=size,
        num_heads=heads,
        head_dim=head_dim,
        blocks=(Run(block=block, count=fields.take("num_layers", 28)),),
        positions=SinCosConfig(base=size // patch),
        embedder=EmbedderConfig(
            classes=fields.take("num_embeds_ada_norm", 1000), frequency_shift=1.0
        ),
    )


def _write(config: TransformerConfig) -> dict[str, Any]:
    ((block, count),) = [(run.block, run.count) for run in config.blocks]
    return {
        "num_attention_heads": config.num_heads,
        "attention_head_dim": config.head_dim,
        "in_channels": config.channels,
        "out_channels": config.out_channels,
        "num_layers": count,
        "dropout": 0.0,
        "norm_num_groups": 32,
        "attention_bias": block.bias,
        "sample_size": config.sample_size,
        "patch_size": config.patch[0],
        "activation_fn": feed_forward_name(block.mlp),
        "num_embeds_ada_norm": config.embedder.classes,
        "upcast_attention": False,
        "norm_type": "ada_norm_zero",
        "norm_elementwise_affine": block.mlp_norm.scale,
        "norm_eps": block.mlp_norm.eps,
    }


def _keys(config: TransformerConfig) -> list[Key]:
    block, layers = "transformer_blocks.{}", range(config.num_layers)
    vectors, embedder = "blocks/0/vectors", f"{block}.norm1.emb"
    return [
        patch_key("pos_embed.proj", config),
        *embedder_keys(f"{vectors}/embedder/time", f"{embedder}.timestep_embedder", layers),
        Key(
            f"{vectors}/embedder/classes",
            f"{embedder}.class_embedder.embedding_table",
            layers=layers,
        ),
        Key(f"{vectors}/projection/linear", f"{block}.norm1.linear", layers=layers),
        *attention_keys("blocks/0/attention", f"{block}.attn1", layers),
        Key("blocks/0/mlp_norm", f"{block}.norm3", layers=layers),
        *feed_forward_keys("blocks/0/mlp", f"{block}.ff", layers),
        Key("head/modulation/linear", "proj_out_1"),
        Key("head/out", "proj_out_2"),
    ]


DIT = Component(
    class_name="DiTTransformer2DModel",
    read=_read,
    write=_write,
    make=Transformer,
    keys=_keys,
)
