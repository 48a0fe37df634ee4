"""Qwen-Image (Qwen team 2025): diffusers' QwenImageTransformer2DModel.

Their pipeline packs latents of 2 x 2 places into channels before the transformer; here that is the
patch, so the sample is the latents as an autoencoder gives them.
"""

from typing import Any

from fornax.config.errors import ConfigError
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
    feed_forward_keys,
    joint_attention_keys,
    patch_key,
)
from fornax.diffusion.models.transformer.transformer import Transformer

__all__ = ["QWEN_IMAGE"]


def _read(fields: Fields) -> TransformerConfig:
    heads, head_dim = fields.take("num_attention_heads", 24), fields.take("attention_head_dim", 128)
    patch, packed = fields.take("patch_size", 2), fields.take("in_channels", 64)
    for name in ("guidance_embeds", "use_additional_t_cond", "use_layer3d_rope"):
        fields.only(name, False)
    if packed % patch**2:
        raise ConfigError(
            f"in_channels={packed} is not of {patch} x {patch} places; use a multiple of {patch**2}"
        )
    block = BlockConfig(kind="joint", qk_norm=RMS, mlp=MLPConfig(hidden=4 * heads * head_dim))
    out = fields.take("out_channels", 16)
    return TransformerConfig(
        class_name="QwenImageTransformer2DModel",
        channels=packed // patch**2,
        out_channels=packed if out is None else out,
        patch=(patch, patch),
        num_heads=heads,
        head_dim=head_dim,
        blocks=(Run(block=block, count=fields.take("num_layers", 60)),),
        positions=RopeConfig(
            axes=tuple(fields.take("axes_dims_rope", (16, 56, 56))),
            sample_axes=(1, 2),
            centred=True,
            text="all",
            reference_axis=0,
        ),
        clean_references=fields.take("zero_cond_t", False),
        text=TextConfig(width=fields.take("joint_attention_dim", 3584), norm_before=RMS),
    )


def _write(config: TransformerConfig) -> dict[str, Any]:
    assert isinstance(config.positions, RopeConfig), "Qwen-Image rotates"
    assert config.text is not None, "Qwen-Image takes text"
    return {
        "patch_size": config.patch[0],
        "in_channels": config.channels * config.patch[0] ** 2,
        "out_channels": config.out_channels,
        "num_layers": config.num_layers,
        "attention_head_dim": config.head_dim,
        "num_attention_heads": config.num_heads,
        "joint_attention_dim": config.text.width,
        "guidance_embeds": False,
        "axes_dims_rope": list(config.positions.axes),
        "zero_cond_t": config.clean_references,
        "use_additional_t_cond": False,
        "use_layer3d_rope": False,
    }


def _keys(config: TransformerConfig) -> list[Key]:
    block, layers = "transformer_blocks.{}", range(config.num_layers)
    return [
        patch_key("img_in", config, unfolded=False),
        *embedder_keys("embedder/time", "time_text_embed.timestep_embedder"),
        Key("text/norm_before", "txt_norm"),
        Key("text/projection", "txt_in"),
        Key("blocks/0/sample/vectors/projection/linear", f"{block}.img_mod.1", layers=layers),
        Key("blocks/0/text/vectors/projection/linear", f"{block}.txt_mod.1", layers=layers),
        *joint_attention_keys("blocks/0", f"{block}.attn", layers),
        *feed_forward_keys("blocks/0/sample/mlp", f"{block}.img_mlp", layers),
        *feed_forward_keys("blocks/0/text/mlp", f"{block}.txt_mlp", layers),
        Key("head/modulation/linear", "norm_out.linear", order=(1, 0)),
        Key("head/out", "proj_out", patch=config.patch, of_outputs=True),
    ]


QWEN_IMAGE = Component(
    class_name="QwenImageTransformer2DModel",
    read=_read,
    write=_write,
    make=Transformer,
    keys=_keys,
)
