"""HunyuanVideo (Kong et al. 2024): diffusers' HunyuanVideoTransformer3DModel.

The states of its language model pass a refiner, two blocks of their own, before joint blocks. A
first frame is channels beside the sample, or has the place of the sample's first.
"""

from typing import Any

from fornax.config.errors import ConfigError
from fornax.diffusion.models.files import Component, Fields
from fornax.diffusion.models.keys import Key
from fornax.diffusion.models.transformer.config import (
    BlockConfig,
    EmbedderConfig,
    MLPConfig,
    NormConfig,
    RopeConfig,
    Run,
    TextConfig,
    TransformerConfig,
)
from fornax.diffusion.models.transformer.tables import (
    RMS,
    attention_keys,
    embedder_keys,
    feed_forward_keys,
    joint_attention_keys,
    patch_key,
)
from fornax.diffusion.models.transformer.transformer import Transformer

__all__ = ["HUNYUAN_VIDEO"]

_BESIDE, _INSTEAD = "latent_concat", "token_replace"
"""Their `image_condition_type`."""


def _read(fields: Fields) -> TransformerConfig:
    heads, head_dim = fields.take("num_attention_heads", 24), fields.take("attention_head_dim", 128)
    fields.only("qk_norm", "rms_norm")
    kind = fields.take("image_condition_type", None)
    if kind not in (None, _BESIDE, _INSTEAD):
        raise ConfigError(
            f"image_condition_type={kind!r} is not supported; use null, {_BESIDE!r} or {_INSTEAD!r}"
        )
    width, patch = heads * head_dim, fields.take("patch_size", 2)
    hidden = int(width * fields.take("mlp_ratio", 4.0))
    axes = tuple(fields.take("rope_axes_dim", (16, 56, 56)))
    if sum(axes) != head_dim:
        raise ConfigError(
            f"rope_axes_dim={axes} must sum to attention_head_dim={head_dim}, which it turns"
        )
    affine = NormConfig(scale=True, bias=True)
    refiner = BlockConfig(
        scales=False,
        shifts=False,
        norm=affine,
        mlp_norm=affine,
        mlp=MLPConfig(hidden=4 * width, activation="silu"),
    )
    joint = BlockConfig(kind="joint", qk_norm=RMS, mlp=MLPConfig(hidden=hidden))
    single = BlockConfig(
        kind="parallel", qk_norm=RMS, mlp=MLPConfig(hidden=hidden, down_bias=False)
    )
    channels = fields.take("in_channels", 16)
    out_channels = fields.take("out_channels", 16) or channels
    if (kind == _BESIDE) != (channels != out_channels):
        raise ConfigError(
            f"in_channels={channels} and out_channels={out_channels} with "
            f"image_condition_type={kind!r}: only {_BESIDE!r} has channels of an image beside"
        )
    return TransformerConfig(
        class_name="HunyuanVideoTransformer3DModel",
        channels=channels,
        image_channels=channels - out_channels,
        out_channels=out_channels,
        patch=(fields.take("patch_size_t", 1), patch, patch),
        num_heads=heads,
        head_dim=head_dim,
        blocks=(
            Run(block=joint, count=fields.take("num_layers", 20)),
            Run(block=single, count=fields.take("num_single_layers", 40), tokens="both"),
        ),
        positions=RopeConfig(
            axes=axes, theta=fields.take("rope_theta", 256.0), sample_axes=(0, 1, 2)
        ),
        embedder=EmbedderConfig(
            pooled=fields.take("pooled_projection_dim", 768),
            guidance_scale=1000.0 if fields.take("guidance_embeds", True) else None,
        ),
        text=TextConfig(width=fields.take("text_embed_dim", 4096)),
        refine_text=Run(block=refiner, count=fields.take("num_refiner_layers", 2)),
        refine_embedder=True,
        first_frame=kind == _INSTEAD,
    )


def _write(config: TransformerConfig) -> dict[str, Any]:
    joint, single = config.blocks
    assert isinstance(config.positions, RopeConfig), "HunyuanVideo rotates"
    assert config.text is not None, "HunyuanVideo takes text"
    assert config.refine_text is not None, "HunyuanVideo refines text"
    return {
        "in_channels": config.channels,
        "out_channels": config.outputs,
        "num_attention_heads": config.num_heads,
        "attention_head_dim": config.head_dim,
        "num_layers": joint.count,
        "num_single_layers": single.count,
        "num_refiner_layers": config.refine_text.count,
        "mlp_ratio": joint.block.mlp.hidden / config.width,
        "patch_size": config.patch[1],
        "patch_size_t": config.patch[0],
        "qk_norm": "rms_norm",
        "guidance_embeds": config.embedder.guidance_scale is not None,
        "text_embed_dim": config.text.width,
        "pooled_projection_dim": config.embedder.pooled,
        "rope_theta": config.positions.theta,
        "rope_axes_dim": list(config.positions.axes),
        "image_condition_type": _INSTEAD
        if config.first_frame
        else _BESIDE
        if config.image_channels
        else None,
    }


def _keys(config: TransformerConfig) -> list[Key]:
    assert config.refine_text is not None, "HunyuanVideo refines text"
    joint, single = (range(run.count) for run in config.blocks)
    refiners = range(config.refine_text.count)
    double, lone = "transformer_blocks.{}", "single_transformer_blocks.{}"
    around = "context_embedder"
    refiner, vectors = f"{around}.token_refiner.refiner_blocks.{{}}", "vectors/projection/linear"
    return [
        patch_key("x_embedder.proj", config),
        Key("text/projection", f"{around}.proj_in"),
        *embedder_keys("refine_embedder/time", f"{around}.time_text_embed.timestep_embedder"),
        *embedder_keys("refine_embedder/pooled", f"{around}.time_text_embed.text_embedder"),
        Key(f"refine_text/{vectors}", f"{refiner}.norm_out.linear", layers=refiners),
        Key("refine_text/norm", f"{refiner}.norm1", layers=refiners),
        *attention_keys("refine_text/attention", f"{refiner}.attn", refiners),
        Key("refine_text/mlp_norm", f"{refiner}.norm2", layers=refiners),
        *feed_forward_keys("refine_text/mlp", f"{refiner}.ff", refiners),
        *embedder_keys("embedder/time", "time_text_embed.timestep_embedder"),
        *embedder_keys("embedder/guidance", "time_text_embed.guidance_embedder"),
        *embedder_keys("embedder/pooled", "time_text_embed.text_embedder"),
        Key(f"blocks/0/sample/{vectors}", f"{double}.norm1.linear", layers=joint),
        Key(f"blocks/0/text/{vectors}", f"{double}.norm1_context.linear", layers=joint),
        *joint_attention_keys("blocks/0", f"{double}.attn", joint),
        *feed_forward_keys("blocks/0/sample/mlp", f"{double}.ff", joint),
        *feed_forward_keys("blocks/0/text/mlp", f"{double}.ff_context", joint),
        Key(f"blocks/1/{vectors}", f"{lone}.norm.linear", layers=single),
        *attention_keys("blocks/1/attention", f"{lone}.attn", single)[:-1],
        Key("blocks/1/mlp/up", f"{lone}.proj_mlp", layers=single),
        Key("blocks/1/attention/out", f"{lone}.proj_out", layers=single, axis=1),
        Key("blocks/1/mlp/down", f"{lone}.proj_out", layers=single, axis=1),
        Key("head/modulation/linear", "norm_out.linear", order=(1, 0)),
        Key("head/out", "proj_out", patch=config.patch, of_outputs=True),
    ]


HUNYUAN_VIDEO = Component(
    class_name="HunyuanVideoTransformer3DModel",
    read=_read,
    write=_write,
    make=Transformer,
    keys=_keys,
)
