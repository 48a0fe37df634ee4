"""Sana (Xie et al. 2024): diffusers' SanaTransformer2DModel."""

from typing import Any

from fornax.config.errors import ConfigError
from fornax.diffusion.models.files import Component, Fields
from fornax.diffusion.models.keys import Key
from fornax.diffusion.models.transformer.config import (
    BlockConfig,
    CrossConfig,
    EmbedderConfig,
    HeadConfig,
    MLPConfig,
    NormConfig,
    Run,
    SinCosConfig,
    TextConfig,
    TransformerConfig,
)
from fornax.diffusion.models.transformer.tables import attention_keys, embedder_keys, patch_key
from fornax.diffusion.models.transformer.transformer import Transformer

__all__ = ["SANA"]

_ACROSS = "rms_norm_across_heads"
_EPS = 1e-5
"""Of the norms of queries, keys and captions."""


def _read(fields: Fields) -> TransformerConfig:
    heads, head_dim = fields.take("num_attention_heads", 70), fields.take("attention_head_dim", 32)
    width, patch = heads * head_dim, fields.take("patch_size", 1)
    fields.only("dropout", 0.0)
    fields.only("cross_attention_dim", width)
    name = fields.take("qk_norm", None)
    if name not in (None, _ACROSS):
        raise ConfigError(f"qk_norm={name!r} is not supported; use null or {_ACROSS!r}")
    qk_norm = None if name is None else NormConfig(kind="rms", scale=True, eps=_EPS)
    affine, eps = fields.take("norm_elementwise_affine", False), fields.take("norm_eps", 1e-6)
    block = BlockConfig(
        modulation="table",
        norm=NormConfig(eps=eps),
        mlp_norm=NormConfig(scale=affine, bias=affine, eps=eps),
        attention="linear",
        qk_norm=qk_norm,
        across_heads=True,
        bias=fields.take("attention_bias", False),
        cross=CrossConfig(
            num_heads=fields.take("num_cross_attention_heads", 20),
            head_dim=fields.take("cross_attention_head_dim", 112),
            qk_norm=qk_norm,
            across_heads=True,
        ),
        mlp=MLPConfig(
            kind="convolution",
            hidden=int(fields.take("mlp_ratio", 2.5) * width),
            activation="silu",
            down_bias=False,
        ),
    )
    scale, size = fields.take("interpolation_scale", None), fields.take("sample_size", 32)
    guided, guidance = (
        fields.take("guidance_embeds", False),
        fields.take("guidance_embeds_scale", 0.1),
    )
    return TransformerConfig(
        class_name="SanaTransformer2DModel",
        channels=fields.take("in_channels", 32),
        out_channels=fields.take("out_channels", 32),
        patch=(patch, patch),
        sample_size=size,
        num_heads=heads,
        head_dim=head_dim,
        blocks=(Run(block=block, count=fields.take("num_layers", 20)),),
        positions=None if scale is None else SinCosConfig(base=size // patch, scale=scale),
        embedder=EmbedderConfig(
            time_scale=fields.take("timestep_scale", 1.0),
            guidance_scale=guidance if guided else None,
        ),
        text=TextConfig(
            width=fields.take("caption_channels", 2304),
            projection="mlp",
            norm_after=NormConfig(kind="rms", scale=True, eps=_EPS),
        ),
        head=HeadConfig(modulation="table"),
    )


def _write(config: TransformerConfig) -> dict[str, Any]:
    (run,), text, guidance = config.blocks, config.text, config.embedder.guidance_scale
    cross, positions = run.block.cross, config.positions
    assert text is not None, "Sana takes text"
    assert cross is not None, "Sana attends to text"
    return {
        "in_channels": config.channels,
        "out_channels": config.out_channels,
        "num_attention_heads": config.num_heads,
        "attention_head_dim": config.head_dim,
        "num_layers": run.count,
        "num_cross_attention_heads": cross.num_heads,
        "cross_attention_head_dim": cross.head_dim,
        "cross_attention_dim": config.width,
        "caption_channels": text.width,
        "mlp_ratio": run.block.mlp.hidden / config.width,
        "dropout": 0.0,
        "attention_bias": run.block.bias,
        "sample_size": config.sample_size,
        "patch_size": config.patch[0],
        "norm_elementwise_affine": run.block.mlp_norm.scale,
        "norm_eps": run.block.norm.eps,
        "interpolation_scale": positions.scale if isinstance(positions, SinCosConfig) else None,
        "guidance_embeds": guidance is not None,
        "guidance_embeds_scale": 0.1 if guidance is None else guidance,
        "qk_norm": None if run.block.qk_norm is None else _ACROSS,
        "timestep_scale": config.embedder.time_scale,
    }


def _keys(config: TransformerConfig) -> list[Key]:
    block, layers = "transformer_blocks.{}", range(config.num_layers)
    guided = config.embedder.guidance_scale is not None
    times = "time_embed" if guided else "time_embed.emb"
    convolutions = [
        Key(f"blocks/0/mlp/{part}", f"{block}.ff.conv_inverted", layers=layers, trailing=2)
        for part in ("up", "gate")
    ] + [
        Key(f"blocks/0/mlp/{part}_convolution", f"{block}.ff.conv_depth", layers=layers)
        for part in ("up", "gate")
    ]
    return [
        patch_key("patch_embed.proj", config),
        *embedder_keys("embedder/time", f"{times}.timestep_embedder"),
        *embedder_keys("embedder/guidance", f"{times}.guidance_embedder"),
        Key("shared/0/sample/linear", "time_embed.linear"),
        *embedder_keys("text/projection", "caption_projection"),
        Key("text/norm_after", "caption_norm"),
        Key("blocks/0/vectors/table/table", f"{block}.scale_shift_table", layers=layers),
        *attention_keys("blocks/0/attention", f"{block}.attn1", layers),
        *attention_keys("blocks/0/cross", f"{block}.attn2", layers),
        Key("blocks/0/mlp_norm", f"{block}.norm2", layers=layers),
        *convolutions,
        Key("blocks/0/mlp/down", f"{block}.ff.conv_point", layers=layers, trailing=2),
        Key("head/table/table", "scale_shift_table"),
        Key("head/out", "proj_out"),
    ]


SANA = Component(
    class_name="SanaTransformer2DModel",
    read=_read,
    write=_write,
    make=Transformer,
    keys=_keys,
)
