"""Mistral 7B, Nemo, Small: Llama with a sliding window in every layer, or none.

Ministral 3 has queries that grow with their position, too.
"""

import functools
from typing import Any

from fornax.config.errors import ConfigError
from fornax.models.config import DecoderConfig, QueryScaling
from fornax.models.families.common import read_common, write_common
from fornax.models.families.family import BASE_NAMES, PRE_NORM_NAMES, Family
from fornax.models.families.reader import ConfigReader
from fornax.models.families.rope_keys import (
    read_rope,
    read_rope_mapping,
    write_rope,
    write_rope_mapping,
)

__all__ = ["MINISTRAL3", "MISTRAL"]


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


def _read_ministral3(reader: ConfigReader) -> DecoderConfig:
    fields = read_common(reader, tied=False, eps=1e-5)
    limit = fields["max_position_embeddings"]
    rope = reader.nested("rope_parameters", reader.take("rope_parameters"))
    rope.take("max_position_embeddings", None)  # the model's again
    return DecoderConfig(
        **fields,
        **_read_windows(reader, None),
        query_scaling=QueryScaling(
            beta=rope.take("llama_4_scaling_beta"),
            length=rope.take("original_max_position_embeddings"),
        ),
        rope=read_rope_mapping(rope, limit),
    )


def _write_ministral3(config: DecoderConfig) -> dict[str, Any]:
    scaling = config.query_scaling
    if scaling is None:
        raise ConfigError("query_scaling=None")
    return {
        **write_common(config),
        "rope_parameters": {
            **write_rope_mapping(config.rope),
            "llama_4_scaling_beta": scaling.beta,
            "original_max_position_embeddings": scaling.length,
        },
        "sliding_window": config.sliding_window,
    }


_family = functools.partial(Family, names={**BASE_NAMES, **PRE_NORM_NAMES})
MISTRAL = _family("mistral", "MistralForCausalLM", _read_mistral, _write_mistral)
MINISTRAL3 = _family("ministral3", "Ministral3ForCausalLM", _read_ministral3, _write_ministral3)
