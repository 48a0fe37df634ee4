"""Mistral 7B, Nemo, Small: Llama with a sliding window in every layer, or none.

Ministral 3 has queries that grow with their position, too; so has Mistral 4, which is DeepSeek's
latent attention and experts with a softmax router.
"""

import functools
from dataclasses import replace
from typing import Any

from fornax.config.errors import ConfigError
from fornax.models.config import DecoderConfig, QueryScaling
from fornax.models.families.common import read_common, write_common
from fornax.models.families.deepseek import LATENT_NAMES, read_latent, write_latent
from fornax.models.families.family import (
    BASE_NAMES,
    PRE_NORM_NAMES,
    ExpertsTensor,
    Family,
    TensorName,
)
from fornax.models.families.reader import ConfigReader
from fornax.models.families.rope_keys import (
    read_rope,
    read_rope_mapping,
    write_rope,
    write_rope_mapping,
)
from fornax.models.families.routed import mlp_pattern, read_grouped_router, write_grouped_router

__all__ = ["MINISTRAL3", "MISTRAL", "MISTRAL4"]


def _read_windows(reader: ConfigReader, default: int | None) -> dict[str, Any]:
    window = reader.take("sliding_window", default)
    return {
        "sliding_window": window,
        "attention_pattern": ("full",) if window is None else ("sliding",),
    }


def _read_mistral(reader: ConfigReader) -> DecoderConfig:
    fields = read_common(reader, tied=False)
    return DecoderConfig(
        **fields,
        **_read_windows(reader, 4_096),
        rope=read_rope(reader, fields["max_position_embeddings"]),
    )


def _write_mistral(config: DecoderConfig) -> dict[str, Any]:
    return {
        **write_common(config),
        **write_rope(config.rope),
        "sliding_window": config.sliding_window,
    }


def _read_positions(rope: ConfigReader, limit: int) -> dict[str, Any]:
    """`rope` and `query_scaling`, whose keys are in one mapping."""
    rope.take("max_position_embeddings", None)  # the model's again
    scaling = QueryScaling(
        beta=rope.take("llama_4_scaling_beta"),
        length=rope.take("original_max_position_embeddings"),
    )
    return {"query_scaling": scaling, "rope": read_rope_mapping(rope, limit)}


def _write_positions(config: DecoderConfig, **more: Any) -> dict[str, Any]:
    """The inverse of `_read_positions`, with further keys of the mapping."""
    scaling = config.query_scaling
    if scaling is None:
        raise ConfigError("query_scaling=None")
    return {
        "rope_parameters": {
            **write_rope_mapping(config.rope),
            **more,
            "llama_4_scaling_beta": scaling.beta,
            "original_max_position_embeddings": scaling.length,
        }
    }


def _read_ministral3(reader: ConfigReader) -> DecoderConfig:
    fields = read_common(reader, tied=False, eps=1e-5)
    rope = reader.nested("rope_parameters", reader.take("rope_parameters"))
    return DecoderConfig(
        **fields,
        **_read_windows(reader, None),
        **_read_positions(rope, fields["max_position_embeddings"]),
    )


def _write_ministral3(config: DecoderConfig) -> dict[str, Any]:
    return {
        **write_common(config),
        **_write_positions(config),
        "sliding_window": config.sliding_window,
    }


def _read_mistral4(reader: ConfigReader) -> DecoderConfig:
    fields = read_latent(reader, _LATENT_SIZES, "qk_head_dim")
    latent, limit = fields["latent"], fields["max_position_embeddings"]
    width = latent.unrotated_dim + latent.rotated_dim
    found = dict(reader.take("rope_parameters", None) or _MISTRAL4_ROPE)
    fraction = latent.rotated_dim / width
    if found.pop("partial_rotary_factor", fraction) != fraction:
        raise ConfigError(
            f"{reader.source}: rope_parameters.partial_rotary_factor is not the {fraction} of a "
            "head that qk_rope_head_dim says; leave it out"
        )
    positions = _read_positions(reader.nested("rope_parameters", found), limit)
    if positions["rope"].scaling is None:
        raise ConfigError(
            f"{reader.source}: rope_type='default' is not supported for this architecture, whose "
            "reference implementation has no such rotation; use yarn"
        )
    interleaved = reader.take("rope_interleave", True)
    return DecoderConfig(
        **fields,
        query_scaling=positions["query_scaling"],
        rope=replace(positions["rope"], interleaved=interleaved),
        mlp_pattern=mlp_pattern(reader, fields["num_layers"], 0),
        experts=read_grouped_router(reader, groups=1, open_groups=1),
    )


_LATENT_SIZES = {
    "kv_lora_rank": 256,
    "q_lora_rank": 1_024,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_MISTRAL4_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 128.0,
    "original_max_position_embeddings": 8_192,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
"""What the architecture takes where a file says nothing."""


def _write_mistral4(config: DecoderConfig) -> dict[str, Any]:
    keys = write_latent(config)
    fraction = keys["qk_rope_head_dim"] / config.head_width
    return {
        **keys,
        **write_grouped_router(config),
        **_write_positions(config, partial_rotary_factor=fraction),
        "rope_interleave": config.rope.interleaved,
    }


_family = functools.partial(Family, names={**BASE_NAMES, **PRE_NORM_NAMES})
MISTRAL = _family("mistral", "MistralForCausalLM", _read_mistral, _write_mistral)
MINISTRAL3 = _family("ministral3", "Ministral3ForCausalLM", _read_ministral3, _write_ministral3)

_EXPERTS = "model.layers.{layer}.mlp.experts"
_MISTRAL4_NAMES: dict[str, TensorName] = {
    **LATENT_NAMES,
    **{
        f"layers/experts/{part}/kernel": ExpertsTensor(f"{_EXPERTS}.{tensor}", transposed=True)
        for part, tensor in (
            ("gate", "gate_up_proj"),
            ("up", "gate_up_proj"),
            ("down", "down_proj"),
        )
    },
}
MISTRAL4 = Family(
    "mistral4", "Mistral4ForCausalLM", _read_mistral4, _write_mistral4, _MISTRAL4_NAMES
)
