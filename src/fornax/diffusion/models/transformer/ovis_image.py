"""Ovis-Image (Alibaba Ovis Team 2025): diffusers' OvisImageTransformer2DModel.

Flux's blocks with gated MLPs, without pooled text and guidance. Their pipeline packs latents of
2 x 2 places into channels before the transformer; here that is the patch.
"""

from dataclasses import replace
from typing import Any

from fornax.diffusion.models.files import Component, Fields
from fornax.diffusion.models.keys import Key
from fornax.diffusion.models.transformer.config import (
    BlockConfig,
    MLPConfig,
    RopeConfig,
    Run,
    TextConfig,
    TransformerConfig,
)
from fornax.diffusion.models.transformer.tables import (
    RMS,
    embedder_keys,
    joint_then_parallel_keys,
    packed_channels,
    patch_key,
)
from fornax.diffusion.models.transformer.transformer import Transformer

__all__ = ["OVIS_IMAGE"]


def _read(fields: Fields) -> TransformerConfig:
    heads, head_dim = fields.take("num_attention_heads", 24), fields.take("attention_head_dim", 128)
    fields.only("patch_size", 1)
    channels, out = packed_channels(fields, out=64)
    mlp = MLPConfig(kind="gated", hidden=4 * heads * head_dim, activation="silu")
    joint = BlockConfig(kind="joint", qk_norm=RMS, mlp=mlp)
    # One projection gives the sum of both branches, and its bias is the attention's.
    single = BlockConfig(kind="parallel", qk_norm=RMS, mlp=replace(mlp, down_bias=False))
    return TransformerConfig(
        class_name="OvisImageTransformer2DModel",
        channels=channels,
        out_channels=out,
        patch=(2, 2),
        num_heads=heads,
        head_dim=head_dim,
        blocks=(
            Run(block=joint, count=fields.take("num_layers", 6)),
            Run(block=single, count=fields.take("num_single_layers", 27), tokens="both"),
        ),
        positions=RopeConfig(
            axes=tuple(fields.take("axes_dims_rope", (16, 56, 56))),
            sample_axes=(1, 2),
            text="sample_axes",
        ),
        text=TextConfig(width=fields.take("joint_attention_dim", 2048), norm_before=RMS),
    )


def _write(config: TransformerConfig) -> dict[str, Any]:
    joint, single = config.blocks
    assert isinstance(config.positions, RopeConfig), "Ovis-Image rotates"
    assert config.text is not None, "Ovis-Image takes text"
    return {
        "patch_size": 1,
        "in_channels": config.channels * 4,
        "out_channels": None if config.out_channels is None else config.out_channels * 4,
        "num_layers": joint.count,
        "num_single_layers": single.count,
        "attention_head_dim": config.head_dim,
        "num_attention_heads": config.num_heads,
        "joint_attention_dim": config.text.width,
        "axes_dims_rope": list(config.positions.axes),
    }


def _keys(config: TransformerConfig) -> list[Key]:
    return [
        patch_key("x_embedder", config, unfolded=False),
        *embedder_keys("embedder/time", "timestep_embedder"),
        Key("text/norm_before", "context_embedder_norm"),
        Key("text/projection", "context_embedder"),
        *joint_then_parallel_keys(config),
        Key("head/modulation/linear", "norm_out.linear", order=(1, 0)),
        Key("head/out", "proj_out", patch=config.patch, of_outputs=True),
    ]


OVIS_IMAGE = Component(
    class_name="OvisImageTransformer2DModel",
    read=_read,
    write=_write,
    make=Transformer,
    keys=_keys,
)
