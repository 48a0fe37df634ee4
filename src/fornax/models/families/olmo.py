"""OLMo 2: norms after attention and MLP, and over the full width of queries and keys."""

from typing import Any

from fornax.models.config import DecoderConfig
from fornax.models.families.common import read_common, write_common
from fornax.models.families.family import BASE_NAMES, Family
from fornax.models.families.reader import ConfigReader
from fornax.models.families.rope_keys import read_rope, write_rope

__all__ = ["OLMO2"]


def _read(reader: ConfigReader) -> DecoderConfig:
    fields = read_common(reader, tied=False, eps=1e-5)
    bias = reader.take("attention_bias", False)
    return DecoderConfig(
        **fields,
        rope=read_rope(reader, fields["max_position_embeddings"]),
        qkv_bias=bias,
        attention_output_bias=bias,
        qk_norm="full",
        norm_placement="post",
    )


def _write(config: DecoderConfig) -> dict[str, Any]:
    return {
        **write_common(config),
        **write_rope(config.rope),
        "attention_bias": config.qkv_bias,
    }


_NAMES = {
    **BASE_NAMES,
    "layers/post_attention_norm/scale": "model.layers.{layer}.post_attention_layernorm.weight",
    "layers/post_mlp_norm/scale": "model.layers.{layer}.post_feedforward_layernorm.weight",
}

OLMO2 = Family("olmo2", "Olmo2ForCausalLM", _read, _write, _NAMES)
