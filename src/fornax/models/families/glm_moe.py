"""GLM-4.5 and 4.6: DeepSeek V3's router with grouped-query attention; 4.7 Flash: with latent."""

from typing import Any

from fornax.config.errors import ConfigError
from fornax.models.config import DecoderConfig
from fornax.models.families.common import read_common, shortest_pattern, write_common
from fornax.models.families.deepseek import LATENT_NAMES, read_latent, write_latent
from fornax.models.families.family import BASE_NAMES, PRE_NORM_NAMES, Family
from fornax.models.families.reader import ConfigReader, as_list
from fornax.models.families.rope_keys import read_rope, write_rope
from fornax.models.families.routed import (
    ROUTED_MTP,
    ROUTED_NAMES,
    mlp_pattern,
    read_sigmoid_router,
    with_modules,
    write_grouped_router,
    write_routed,
)

__all__ = ["GLM4_MOE", "GLM4_MOE_LITE"]


def _read(reader: ConfigReader) -> DecoderConfig:
    fields = read_common(reader, tied=False, eps=1e-5)
    return DecoderConfig(
        **fields,
        rope=read_rope(reader, fields["max_position_embeddings"], partial=True, fraction=0.5),
        qkv_bias=reader.take("attention_bias", False),
        qk_norm="head" if reader.take("use_qk_norm", False) else "none",
        mlp_pattern=mlp_pattern(reader, fields["num_layers"], 1),
        experts=read_sigmoid_router(reader, groups=1, open_groups=1, scale=1.0),
    )


def _write(config: DecoderConfig) -> dict[str, Any]:
    return {
        **write_common(config),
        **write_rope(config.rope),
        **write_routed(config),
        **write_grouped_router(config),
        "partial_rotary_factor": config.rope.fraction,
        "attention_bias": config.qkv_bias,
        "use_qk_norm": config.qk_norm == "head",
    }


_NAMES = with_modules({**BASE_NAMES, **PRE_NORM_NAMES, **ROUTED_NAMES})
GLM4_MOE = Family("glm4_moe", "Glm4MoeForCausalLM", _read, _write, _NAMES, ROUTED_MTP)


_LATENT_SIZES = {
    "kv_lora_rank": 512,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
}
_MLPS = {"dense": "mlp", "sparse": "experts"}


def _read_lite(reader: ConfigReader) -> DecoderConfig:
    fields = read_latent(reader, _LATENT_SIZES, "qk_rope_head_dim", eps=1e-5)
    leading = mlp_pattern(reader, fields["num_layers"], 1)
    interleaved = reader.take("rope_interleave", True)
    return DecoderConfig(
        **fields,
        rope=read_rope(reader, fields["max_position_embeddings"], interleaved=interleaved),
        mlp_pattern=_mlp_types(reader, fields["num_layers"]) or leading,
        experts=read_sigmoid_router(reader, groups=1, open_groups=1, scale=1.8),
    )


def _mlp_types(reader: ConfigReader, layers: int) -> tuple[Any, ...] | None:
    given = reader.take("mlp_layer_types", None)
    if given is None:
        return None
    types = as_list(given, "mlp_layer_types", reader, layers)
    for kind in types:
        if kind not in _MLPS:
            raise ConfigError(
                f"{reader.source}: MLP type {kind!r} is not supported; use one of "
                f"{', '.join(_MLPS)}"
            )
    return shortest_pattern([_MLPS[kind] for kind in types])


def _write_lite(config: DecoderConfig) -> dict[str, Any]:
    theirs = {ours: kind for kind, ours in _MLPS.items()}
    keys = {
        **write_latent(config),
        **write_rope(config.rope),
        **write_grouped_router(config),
        "rope_interleave": config.rope.interleaved,
        "mlp_layer_types": [theirs[kind.mlp] for kind in config.layer_kinds()],
    }
    return {**keys, "head_dim": keys["qk_rope_head_dim"]}


GLM4_MOE_LITE = Family(
    "glm4_moe_lite",
    "Glm4MoeLiteForCausalLM",
    _read_lite,
    _write_lite,
    with_modules(LATENT_NAMES),
    ROUTED_MTP,
)
