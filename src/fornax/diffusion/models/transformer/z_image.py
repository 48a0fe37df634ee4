"""Z-Image (Tongyi 2025): diffusers' ZImageTransformer2DModel.

It counts time from noise to data, 0 to 1, and predicts data minus noise; here time and output are
those of the other flows.
"""

from dataclasses import replace
from typing import Any

from fornax.config.errors import ConfigError
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
from fornax.diffusion.models.transformer.tables import attention_keys
from fornax.diffusion.models.transformer.transformer import Transformer

__all__ = ["Z_IMAGE"]

_EMBEDDING, _HIDDEN, _MULTIPLE = 256, 1024, 32
"""Their constants: widths of the embedding and of its MLP, and what tokens are filled up to."""


def _read(fields: Fields) -> TransformerConfig:
    heads, width = fields.take("n_heads", 30), fields.take("dim", 3840)
    fields.only("n_kv_heads", heads)
    fields.only("siglip_feat_dim", None)
    patches = fields.take("all_patch_size", (2,)), fields.take("all_f_patch_size", (1,))
    if len(patches[0]) != 1 or list(patches[1]) != [1]:
        raise ConfigError(
            f"all_patch_size={patches[0]} and all_f_patch_size={patches[1]} are not supported; one "
            "size of patches, of one frame, is"
        )
    if width % heads:
        raise ConfigError(f"dim={width} does not divide over n_heads={heads}")
    (patch,), eps = patches[0], fields.take("norm_eps", 1e-5)
    norm = NormConfig(kind="rms", scale=True, eps=eps)
    qk_norm = NormConfig(kind="rms", scale=True, eps=1e-5)
    block = BlockConfig(
        shifts=False,
        gate="tanh",
        norm=norm,
        mlp_norm=norm,
        post_norm=norm,
        qk_norm=qk_norm if fields.take("qk_norm", True) else None,
        bias=False,
        out_bias=False,
        mlp=MLPConfig(
            kind="gated",
            hidden=int(width / 3 * 8),
            activation="silu",
            bias=False,
            down_bias=False,
        ),
    )
    refiners, scale = fields.take("n_refiner_layers", 2), fields.take("t_scale", 1000.0)
    return TransformerConfig(
        class_name="ZImageTransformer2DModel",
        channels=fields.take("in_channels", 16),
        patch=(patch, patch),
        num_heads=heads,
        head_dim=width // heads,
        blocks=(Run(block=block, count=fields.take("n_layers", 30), tokens="both"),),
        refine_sample=Run(block=block, count=refiners),
        refine_text=Run(block=replace(block, modulation="none"), count=refiners),
        positions=RopeConfig(
            axes=tuple(fields.take("axes_dims", (32, 48, 48))),
            limits=tuple(fields.take("axes_lens", (1024, 512, 512))),
            theta=fields.take("rope_theta", 256.0),
            sample_axes=(1, 2),
            text="axis",
            text_start=1,
            sample_after_text=True,
        ),
        embedder=EmbedderConfig(
            hidden=_HIDDEN,
            width=min(width, _EMBEDDING),
            time_scale=-scale / 1000,
            time_offset=scale,
            activate=False,
        ),
        text=TextConfig(width=fields.take("cap_feat_dim", 2560), norm_before=norm),
        pad_multiple=_MULTIPLE,
        head=HeadConfig(shifts=False),
        output_scale=-1.0,
    )


def _write(config: TransformerConfig) -> dict[str, Any]:
    (run,), positions, text = config.blocks, config.positions, config.text
    assert isinstance(positions, RopeConfig), "Z-Image rotates"
    assert text is not None, "Z-Image takes text"
    assert config.refine_text is not None, "Z-Image refines text"
    return {
        "all_patch_size": [config.patch[0]],
        "all_f_patch_size": [1],
        "in_channels": config.channels,
        "dim": config.width,
        "n_layers": run.count,
        "n_refiner_layers": config.refine_text.count,
        "n_heads": config.num_heads,
        "n_kv_heads": config.num_heads,
        "norm_eps": run.block.norm.eps,
        "qk_norm": run.block.qk_norm is not None,
        "cap_feat_dim": text.width,
        "siglip_feat_dim": None,
        "rope_theta": positions.theta,
        "t_scale": config.embedder.time_offset,
        "axes_dims": list(positions.axes),
        "axes_lens": list(positions.limits or ()),
    }


def _block_keys(path: str, name: str, layers: range) -> list[Key]:
    feed = f"{name}.feed_forward"
    return [
        Key(f"{path}/vectors/projection/linear", f"{name}.adaLN_modulation.0", layers=layers),
        Key(f"{path}/norm", f"{name}.attention_norm1", layers=layers),
        *attention_keys(f"{path}/attention", f"{name}.attention", layers),
        Key(f"{path}/post_norm", f"{name}.attention_norm2", layers=layers),
        Key(f"{path}/mlp_norm", f"{name}.ffn_norm1", layers=layers),
        Key(f"{path}/mlp/gate", f"{feed}.w1", layers=layers),
        Key(f"{path}/mlp/up", f"{feed}.w3", layers=layers),
        Key(f"{path}/mlp/down", f"{feed}.w2", layers=layers),
        Key(f"{path}/post_mlp_norm", f"{name}.ffn_norm2", layers=layers),
    ]


def _keys(config: TransformerConfig) -> list[Key]:
    assert config.refine_text is not None, "Z-Image refines text"
    refiners, patch = range(config.refine_text.count), f"{config.patch[0]}-1"
    return [
        Key("patch", f"all_x_embedder.{patch}"),
        Key("embedder/time/up", "t_embedder.mlp.0"),
        Key("embedder/time/down", "t_embedder.mlp.2"),
        Key("text/norm_before", "cap_embedder.0"),
        Key("text/projection", "cap_embedder.1"),
        Key("sample_pad", "x_pad_token", leading=1),
        Key("text_pad", "cap_pad_token", leading=1),
        *_block_keys("refine_sample", "noise_refiner.{}", refiners),
        *_block_keys("refine_text", "context_refiner.{}", refiners),
        *_block_keys("blocks/0", "layers.{}", range(config.num_layers)),
        Key("head/modulation/linear", f"all_final_layer.{patch}.adaLN_modulation.1"),
        Key("head/out", f"all_final_layer.{patch}.linear"),
    ]


Z_IMAGE = Component(
    class_name="ZImageTransformer2DModel",
    read=_read,
    write=_write,
    make=Transformer,
    keys=_keys,
)
