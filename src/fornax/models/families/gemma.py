"""Gemma 2 (soft caps, alternating windows) and Gemma 3 text (qk-norm, a local rope)."""

from typing import Any

from fornax.config.errors import ConfigError
from fornax.models.config import DecoderConfig
from fornax.models.families.common import (
    layer_types,
    read_common,
    read_layer_types,
    write_common,
)
from fornax.models.families.family import BASE_NAMES, SANDWICH_NAMES, Family
from fornax.models.families.reader import ConfigReader
from fornax.models.families.rope_keys import read_rope, read_two_ropes, write_rope

__all__ = ["GEMMA2", "GEMMA3"]

_ACTIVATION = "hidden_activation"


def _read_shared(reader: ConfigReader, period: int, sliding_window: int | None) -> dict[str, Any]:
    reader.take("hidden_act", None)  # an older name that the architecture does not read
    reader.expect("use_bidirectional_attention", None, False)
    fields = read_common(reader, tied=True, activation_key=_ACTIVATION)
    if fields["head_dim"] is None:
        fields["head_dim"] = 256
    layers = fields["num_layers"]
    default = [
        "sliding_attention" if (index + 1) % period else "full_attention" for index in range(layers)
    ]
    bias = reader.take("attention_bias", False)
    return {
        **fields,
        **read_layer_types(reader, layers, sliding_window, default),
        "qkv_bias": bias,
        "attention_output_bias": bias,
        "query_pre_attn_scalar": reader.take("query_pre_attn_scalar", 256),
        "norm_placement": "sandwich",
        "norm_unit_offset": True,
        "scale_embeddings": True,
    }


def _write_shared(config: DecoderConfig) -> dict[str, object]:
    scalar = config.query_pre_attn_scalar
    scalar = config.head_width if scalar is None else scalar
    return {
        **write_common(config, activation_key=_ACTIVATION),
        "attention_bias": config.qkv_bias,
        "query_pre_attn_scalar": int(scalar) if scalar == int(scalar) else scalar,
        "sliding_window": config.sliding_window,
        "layer_types": layer_types(config),
        "final_logit_softcapping": config.final_logit_softcap,
        "attn_logit_softcapping": config.attention_logit_softcap,
    }


def _read_gemma2(reader: ConfigReader) -> DecoderConfig:
    window = reader.take("sliding_window", 4_096)
    reader.expect("sliding_window_size", window)  # a second name in the first releases
    fields = _read_shared(reader, 2, window)
    return DecoderConfig(
        **fields,
        rope=read_rope(reader, fields["max_position_embeddings"]),
        attention_logit_softcap=reader.take("attn_logit_softcapping", 50.0),
        final_logit_softcap=reader.take("final_logit_softcapping", 30.0),
    )


def _write_gemma2(config: DecoderConfig) -> dict[str, object]:
    return {**_write_shared(config), **write_rope(config.rope)}


def _read_gemma3(reader: ConfigReader) -> DecoderConfig:
    period = reader.take("sliding_window_pattern", reader.take("_sliding_window_pattern", 6))
    fields = _read_shared(reader, period, reader.take("sliding_window", 4_096))
    reader.expect("attn_logit_softcapping", None)
    limit = fields["max_position_embeddings"]
    local_theta = reader.take("rope_local_base_freq", 10_000.0)
    rope, local = read_two_ropes(reader, limit, theta=1_000_000.0, local_theta=local_theta)
    return DecoderConfig(
        **fields,
        rope=rope,
        local_rope=local if "sliding" in fields.get("attention_pattern", ()) else None,
        qk_norm="head",
        final_logit_softcap=reader.take("final_logit_softcapping", None),
    )


def _write_gemma3(config: DecoderConfig) -> dict[str, object]:
    local = config.local_rope or config.rope
    if local.scaling is not None or local.fraction != 1.0:
        raise ConfigError("local_rope: Gemma 3 has neither scaling nor partial rotation there")
    return {
        **_write_shared(config),
        **write_rope(config.rope),
        "rope_local_base_freq": local.theta,
    }


_NAMES = {**BASE_NAMES, **SANDWICH_NAMES}

GEMMA2 = Family("gemma2", "Gemma2ForCausalLM", _read_gemma2, _write_gemma2, _NAMES)
GEMMA3 = Family("gemma3_text", "Gemma3ForCausalLM", _read_gemma3, _write_gemma3, _NAMES)
