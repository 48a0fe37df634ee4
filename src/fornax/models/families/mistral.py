"""Mistral 7B, Nemo, Small: Llama with a sliding window in every layer, or none."""

from typing import Any

from fornax.models.config import DecoderConfig
from fornax.models.families.common import read_common, write_common
from fornax.models.families.family import BASE_NAMES, PRE_NORM_NAMES, Family
from fornax.models.families.reader import ConfigReader
from fornax.models.families.rope_keys import read_rope, write_rope

__all__ = ["MISTRAL"]


def _read(reader: ConfigReader) -> DecoderConfig:
    fields = read_common(reader, tied=False)
    window = reader.take("sliding_window", 4_096)
    return DecoderConfig(
        **fields,
        rope=read_rope(reader, fields["max_position_embeddings"]),
        sliding_window=window,
        attention_pattern=("full",) if window is None else ("sliding",),
    )


def _write(config: DecoderConfig) -> dict[str, Any]:
    return {
        **write_common(config),
        **write_rope(config.rope),
        "sliding_window": config.sliding_window,
    }


MISTRAL = Family("mistral", "MistralForCausalLM", _read, _write, {**BASE_NAMES, **PRE_NORM_NAMES})
