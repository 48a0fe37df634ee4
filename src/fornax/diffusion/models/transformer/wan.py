"""Wan 2.1 and 2.2 (Wan Team 2025): diffusers' WanTransformer3DModel, of text or with a first frame.

A first frame is channels beside the sample, and in 2.1 CLIP's states too; Wan 2.2's 5B model, whose
channels are the sample's alone, has it instead of the sample's first. Wan 2.2's 14B models are
two of them, each for a part of the times.
"""

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
    RopeConfig,
    Run,
    TextConfig,
    TransformerConfig,
)
from fornax.diffusion.models.transformer.tables import (
    attention_keys,
    embedder_keys,
    feed_forward_keys,
    patch_key,
)
from fornax.diffusion.models.transformer.transformer import Transformer

__all__ = ["WAN"]

_POSITIONS = 1024
"""Rows of their tables of angles along each axis."""


def _axes(head_dim: int) -> tuple[int, int, int]:
    """Dimensions of a head that turn with frames, rows and columns."""
    side = 2 * (head_dim // 6)
    return head_dim - 2 * side, side, side


def _read(fields: Fields) -> TransformerConfig:
    heads, head_dim = fields.take("num_attention_heads", 40), fields.take("attention_head_dim", 128)
    states, added = fields.take("image_dim", None), fields.take("added_kv_proj_dim", None)
    if added != (None if states is None else heads * head_dim):
        raise ConfigError(
            f"added_kv_proj_dim={added} with image_dim={states}: keys of an image are made of its "
            f"states at the model's width, {heads * head_dim}; set both, or neither"
        )
    if fields.take("pos_embed_seq_len", None) is not None:
        raise ConfigError(
            "pos_embed_seq_len is of Wan models between a first and a last frame, which are not "
            "supported; use one of a first frame alone"
        )
    fields.only("rope_max_seq_len", _POSITIONS)
    fields.only("qk_norm", "rms_norm_across_heads")
    channels = fields.take("in_channels", 16)
    out_channels = fields.take("out_channels", 16) or channels
    eps = fields.take("eps", 1e-6)
    norm, heads_norm = NormConfig(eps=eps), NormConfig(kind="rms", scale=True, eps=eps)
    affine = NormConfig(scale=True, bias=True, eps=eps)
    block = BlockConfig(
        modulation="table",
        norm=norm,
        mlp_norm=norm,
        qk_norm=heads_norm,
        across_heads=True,
        cross=CrossConfig(
            num_heads=heads,
            head_dim=head_dim,
            norm=affine if fields.take("cross_attn_norm", True) else None,
            qk_norm=heads_norm,
            across_heads=True,
            images=states is not None,
        ),
        mlp=MLPConfig(hidden=fields.take("ffn_dim", 13_824)),
    )
    patch = tuple(fields.take("patch_size", (1, 2, 2)))
    return TransformerConfig(
        class_name="WanTransformer3DModel",
        channels=channels,
        image_channels=channels - out_channels,
        out_channels=out_channels,
        patch=patch,
        num_heads=heads,
        head_dim=head_dim,
        blocks=(Run(block=block, count=fields.take("num_layers", 40)),),
        positions=RopeConfig(axes=_axes(head_dim), sample_axes=(0, 1, 2)),
        embedder=EmbedderConfig(channels=fields.take("freq_dim", 256)),
        text=TextConfig(width=fields.take("text_dim", 4_096), projection="mlp"),
        image_states=states,
        first_frame=channels == out_channels and patch[0] == 1,
        head=HeadConfig(modulation="table", norm=norm),
    )


def _write(config: TransformerConfig) -> dict[str, Any]:
    (run,), text = config.blocks, config.text
    assert text is not None, "Wan takes text"
    assert run.block.cross is not None, "Wan attends to text"
    return {
        "patch_size": list(config.patch),
        "num_attention_heads": config.num_heads,
        "attention_head_dim": config.head_dim,
        "in_channels": config.channels,
        "out_channels": config.outputs,
        "text_dim": text.width,
        "freq_dim": config.embedder.channels,
        "ffn_dim": run.block.mlp.hidden,
        "num_layers": run.count,
        "cross_attn_norm": run.block.cross.norm is not None,
        "qk_norm": "rms_norm_across_heads",
        "eps": run.block.norm.eps,
        "image_dim": config.image_states,
        "added_kv_proj_dim": None if config.image_states is None else config.width,
        "rope_max_seq_len": _POSITIONS,
        "pos_embed_seq_len": None,
    }


def _keys(config: TransformerConfig) -> list[Key]:
    block, layers = "blocks.{}", range(config.num_layers)
    table, image = f"{block}.scale_shift_table", "condition_embedder.image_embedder"
    return [
        patch_key("patch_embedding", config),
        *embedder_keys("embedder/time", "condition_embedder.time_embedder"),
        Key("shared/0/sample/linear", "condition_embedder.time_proj"),
        *embedder_keys("text/projection", "condition_embedder.text_embedder"),
        Key("image_in/norm_before", f"{image}.norm1"),
        Key("image_in/mlp/up", f"{image}.ff.net.0.proj"),
        Key("image_in/mlp/down", f"{image}.ff.net.2"),
        Key("image_in/norm_after", f"{image}.norm2"),
        Key("blocks/0/vectors/table/table", table, layers=layers, leading=1),
        *attention_keys("blocks/0/attention", f"{block}.attn1", layers),
        Key("blocks/0/cross_norm", f"{block}.norm2", layers=layers),
        *attention_keys("blocks/0/cross", f"{block}.attn2", layers),
        Key("blocks/0/cross/image_k", f"{block}.attn2.add_k_proj", layers=layers),
        Key("blocks/0/cross/image_v", f"{block}.attn2.add_v_proj", layers=layers),
        Key("blocks/0/cross/image_k_norm", f"{block}.attn2.norm_added_k", layers=layers),
        *feed_forward_keys("blocks/0/mlp", f"{block}.ffn", layers),
        Key("head/table/table", "scale_shift_table", leading=1),
        Key("head/out", "proj_out"),
    ]


WAN = Component(
    class_name="WanTransformer3DModel",
    read=_read,
    write=_write,
    make=Transformer,
    keys=_keys,
)
