"""OLMo 2 and 3: norms after attention and MLP, and over the full width of queries and keys.

OLMo 3 has sliding layers between, whose rope is their own.
"""

from typing import Any

from fornax.models.config import DecoderConfig
from fornax.models.families.common import (
    layer_types,
    read_common,
    read_layer_types,
    write_common,
)
from fornax.models.families.family import BASE_NAMES, Family
from fornax.models.families.reader import ConfigReader
from fornax.models.families.rope_keys import (
    read_rope,
    read_two_ropes,
    write_rope,
    write_two_ropes,
)

__all__ = ["OLMO2", "OLMO3"]


def _read_shared(reader: ConfigReader) -> dict[str, Any]:
    bias = reader.take("attention_bias", False)
    return {
        **read_common(reader, tied=False, eps=1e-5),
        "qkv_bias": bias,
        "attention_output_bias": bias,
        "qk_norm": "full",
        "norm_placement": "post",
    }


def _write_shared(config: DecoderConfig) -> dict[str, Any]:
    return {**write_common(config), "attention_bias": config.qkv_bias}


def _read_olmo2(reader: ConfigReader) -> DecoderConfig:
    fields = _read_shared(reader)
    return DecoderConfig(**fields, rope=read_rope(reader, fields["max_position_embeddings"]))


def _write_olmo2(config: DecoderConfig) -> dict[str, Any]:
    return {**_write_shared(config), **write_rope(config.rope)}


def _read_olmo3(reader: ConfigReader) -> DecoderConfig:
    fields = _read_shared(reader)
    layers, limit = fields["num_layers"], fields["max_position_embeddings"]
    default = [
        "full_attention" if index % 4 == 3 else "sliding_attention" for index in range(layers)
    ]
    windows = read_layer_types(reader, layers, reader.take("sliding_window", 4_096), default)
    theta = reader.take("rope_theta", 500_000.0)
    rope, local = read_two_ropes(reader, limit, theta=theta, local_theta=theta)
    return DecoderConfig(
        **fields, **windows, rope=rope, local_rope=local if windows and local != rope else None
    )


def _write_olmo3(config: DecoderConfig) -> dict[str, Any]:
    return {
        **_write_shared(config),
        **write_two_ropes(config.rope, config.local_rope or config.rope),
        "layer_types": layer_types(config),
        "sliding_window": config.sliding_window,
    }


_NAMES = {
    **BASE_NAMES,
    "layers/post_attention_norm/scale": "model.layers.{layer}.post_attention_layernorm.weight",
    "layers/post_mlp_norm/scale": "model.layers.{layer}.post_feedforward_layernorm.weight",
}

OLMO2 = Family("olmo2", "Olmo2ForCausalLM", _read_olmo2, _write_olmo2, _NAMES)
OLMO3 = Family("olmo3", "Olmo3ForCausalLM", _read_olmo3, _write_olmo3, _NAMES)
