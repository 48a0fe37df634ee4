"""Flux (Black Forest Labs 2024): diffusers' FluxTransformer2DModel.

Their pipeline packs latents of 2 x 2 places into channels before the transformer; here that is the
patch, so the sample is the latents as an autoencoder gives them.
"""

from typing import Any

from fornax.diffusion.models.files import Component, Fields
from fornax.diffusion.models.keys import Key
from fornax.diffusion.models.transformer.config import (
    BlockConfig,
    EmbedderConfig,
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

__all__ = ["FLUX"]

_PATCH = (2, 2)


def _read(fields: Fields) -> TransformerConfig:
    heads, head_dim = fields.take("num_attention_heads", 24), fields.take("attention_head_dim", 128)
    width = heads * head_dim
    fields.only("patch_size", 1)
    channels, out = packed_channels(fields, out=None)
    joint = BlockConfig(kind="joint", qk_norm=RMS, mlp=MLPConfig(hidden=4 * width))
    single = BlockConfig(
        kind="parallel", qk_norm=RMS, mlp=MLPConfig(hidden=4 * width, down_bias=False)
    )
    return TransformerConfig(
        class_name="FluxTransformer2DModel",
        channels=channels,
        out_channels=out,
        patch=_PATCH,
        num_heads=heads,
        head_dim=head_dim,
        blocks=(
            Run(block=joint, count=fields.take("num_layers", 19)),
            Run(block=single, count=fields.take("num_single_layers", 38), tokens="both"),
        ),
        positions=RopeConfig(
            axes=tuple(fields.take("axes_dims_rope", (16, 56, 56))),
            sample_axes=(1, 2),
            reference_axis=0,
        ),
        embedder=EmbedderConfig(
            pooled=fields.take("pooled_projection_dim", 768),
            guidance_scale=1000.0 if fields.take("guidance_embeds", False) else None,
        ),
        text=TextConfig(width=fields.take("joint_attention_dim", 4096)),
    )


def _write(config: TransformerConfig) -> dict[str, Any]:
    joint, single = config.blocks
    assert isinstance(config.positions, RopeConfig), "Flux rotates"
    assert config.text is not None, "Flux takes text"
    return {
        "patch_size": 1,
        "in_channels": config.channels * 4,
        "out_channels": None if config.out_channels is None else config.out_channels * 4,
        "num_layers": joint.count,
        "num_single_layers": single.count,
        "attention_head_dim": config.head_dim,
        "num_attention_heads": config.num_heads,
        "joint_attention_dim": config.text.width,
        "pooled_projection_dim": config.embedder.pooled,
        "guidance_embeds": config.embedder.guidance_scale is not None,
        "axes_dims_rope": list(config.positions.axes),
    }


def _keys(config: TransformerConfig) -> list[Key]:
    return [
        patch_key("x_embedder", config, unfolded=False),
        *embedder_keys("embedder/time", "time_text_embed.timestep_embedder"),
        *embedder_keys("embedder/guidance", "time_text_embed.guidance_embedder"),
        *embedder_keys("embedder/pooled", "time_text_embed.text_embedder"),
        Key("text/projection", "context_embedder"),
        *joint_then_parallel_keys(config),
        Key("head/modulation/linear", "norm_out.linear", order=(1, 0)),
        Key("head/out", "proj_out", patch=config.patch, of_outputs=True),
    ]


FLUX = Component(
    class_name="FluxTransformer2DModel",
    read=_read,
    write=_write,
    make=Transformer,
    keys=_keys,
)
