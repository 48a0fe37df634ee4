"""FLUX.2 (Black Forest Labs 2025): diffusers' Flux2Transformer2DModel.

Its latents are normalised after 2 x 2 places were packed into channels, so the sample is packed.
"""

from typing import Any

from fornax.diffusion.models.files import Component, Fields
from fornax.diffusion.models.keys import Key
from fornax.diffusion.models.transformer.config import (
    BlockConfig,
    EmbedderConfig,
    HeadConfig,
    MLPConfig,
    NormConfig,
    RopeConfig,
    Run,
    TextConfig,
    TransformerConfig,
)
from fornax.diffusion.models.transformer.tables import (
    attention_keys,
    embedder_keys,
    joint_attention_keys,
)
from fornax.diffusion.models.transformer.transformer import Transformer

__all__ = ["FLUX2"]

_TEXT_AXIS = 3


def _read(fields: Fields) -> TransformerConfig:
    heads, head_dim = fields.take("num_attention_heads", 48), fields.take("attention_head_dim", 128)
    fields.only("patch_size", 1)
    eps, ratio = fields.take("eps", 1e-6), fields.take("mlp_ratio", 3.0)
    norm = NormConfig(eps=eps)
    mlp = MLPConfig(
        kind="gated",
        hidden=int(heads * head_dim * ratio),
        activation="silu",
        bias=False,
        down_bias=False,
    )
    joint, single = (
        BlockConfig(
            kind=kind,
            modulation="shared",
            modulation_bias=False,
            norm=norm,
            mlp_norm=norm,
            qk_norm=NormConfig(kind="rms", scale=True, eps=eps),
            bias=False,
            out_bias=False,
            mlp=mlp,
        )
        for kind in ("joint", "parallel")
    )
    return TransformerConfig(
        class_name="Flux2Transformer2DModel",
        channels=fields.take("in_channels", 128),
        out_channels=fields.take("out_channels", None),
        patch=(1, 1),
        patch_bias=False,
        num_heads=heads,
        head_dim=head_dim,
        blocks=(
            Run(block=joint, count=fields.take("num_layers", 8)),
            Run(block=single, count=fields.take("num_single_layers", 48), tokens="both"),
        ),
        positions=RopeConfig(
            axes=tuple(fields.take("axes_dims_rope", (32, 32, 32, 32))),
            theta=fields.take("rope_theta", 2000),
            sample_axes=(1, 2),
            text="axis",
            text_axis=_TEXT_AXIS,
            reference_axis=0,
            reference_step=10,
        ),
        embedder=EmbedderConfig(
            channels=fields.take("timestep_guidance_channels", 256),
            bias=False,
            guidance_scale=1000.0 if fields.take("guidance_embeds", True) else None,
        ),
        text=TextConfig(width=fields.take("joint_attention_dim", 15360), bias=False),
        head=HeadConfig(modulation_bias=False, norm=norm, bias=False),
    )


def _write(config: TransformerConfig) -> dict[str, Any]:
    joint, single = config.blocks
    assert isinstance(config.positions, RopeConfig), "FLUX.2 rotates"
    assert config.text is not None, "FLUX.2 takes text"
    return {
        "patch_size": 1,
        "in_channels": config.channels,
        "out_channels": config.out_channels,
        "num_layers": joint.count,
        "num_single_layers": single.count,
        "attention_head_dim": config.head_dim,
        "num_attention_heads": config.num_heads,
        "joint_attention_dim": config.text.width,
        "timestep_guidance_channels": config.embedder.channels,
        "mlp_ratio": joint.block.mlp.hidden / config.width,
        "axes_dims_rope": list(config.positions.axes),
        "rope_theta": config.positions.theta,
        "eps": joint.block.norm.eps,
        "guidance_embeds": config.embedder.guidance_scale is not None,
    }


def _gated_keys(path: str, name: str, layers: range) -> list[Key]:
    return [
        Key(f"{path}/gate", f"{name}.linear_in", layers=layers),
        Key(f"{path}/up", f"{name}.linear_in", layers=layers),
        Key(f"{path}/down", f"{name}.linear_out", layers=layers),
    ]


def _keys(config: TransformerConfig) -> list[Key]:
    joint, single = (range(run.count) for run in config.blocks)
    double, lone = "transformer_blocks.{}", "single_transformer_blocks.{}.attn"
    fused = [
        Key(f"blocks/1/{part}", f"{lone}.to_qkv_mlp_proj", layers=single)
        for part in ("attention/q", "attention/k", "attention/v", "mlp/gate", "mlp/up")
    ]
    return [
        Key("patch", "x_embedder"),
        *embedder_keys("embedder/time", "time_guidance_embed.timestep_embedder"),
        *embedder_keys("embedder/guidance", "time_guidance_embed.guidance_embedder"),
        Key("text/projection", "context_embedder"),
        Key("shared/0/sample/linear", "double_stream_modulation_img.linear"),
        Key("shared/0/text/linear", "double_stream_modulation_txt.linear"),
        Key("shared/1/sample/linear", "single_stream_modulation.linear"),
        *joint_attention_keys("blocks/0", f"{double}.attn", joint),
        *_gated_keys("blocks/0/sample/mlp", f"{double}.ff", joint),
        *_gated_keys("blocks/0/text/mlp", f"{double}.ff_context", joint),
        *fused,
        *[key for key in attention_keys("blocks/1/attention", lone, single) if "norm" in key.path],
        Key("blocks/1/attention/out", f"{lone}.to_out", layers=single, axis=1),
        Key("blocks/1/mlp/down", f"{lone}.to_out", layers=single, axis=1),
        Key("head/modulation/linear", "norm_out.linear", order=(1, 0)),
        Key("head/out", "proj_out"),
    ]


FLUX2 = Component(
    class_name="Flux2Transformer2DModel",
    read=_read,
    write=_write,
    make=Transformer,
    keys=_keys,
)
