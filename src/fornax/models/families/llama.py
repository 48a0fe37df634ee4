"""Llama 2, 3, 3.x (and the many models saved as Llama)."""

from typing import Any

from fornax.models.config import DecoderConfig
from fornax.models.families.common import read_common, write_common
from fornax.models.families.family import BASE_NAMES, PRE_NORM_NAMES, Family
from fornax.models.families.reader import ConfigReader
from fornax.models.families.rope_keys import read_rope, write_rope

__all__ = ["LLAMA"]


def _read(reader: ConfigReader) -> DecoderConfig:
    fields = read_common(reader, tied=False)
    bias = reader.take("attention_bias", False)
    return DecoderConfig(
        **fields,
        rope=read_rope(reader, fields["max_position_embeddings"]),
        qkv_bias=bias,
        attention_output_bias=bias,
        mlp_bias=reader.take("mlp_bias", False),
    )


def _write(config: DecoderConfig) -> dict[str, Any]:
    return {
        **write_common(config),
        **write_rope(config.rope),
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
    }


LLAMA = Family("llama", "LlamaForCausalLM", _read, _write, {**BASE_NAMES, **PRE_NORM_NAMES})
