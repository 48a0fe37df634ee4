"""Qwen2 and 2.5 (biases on queries, keys, values) and Qwen3 (norms on queries and keys)."""

import functools
from typing import Any

from fornax.models.config import DecoderConfig
from fornax.models.families.common import (
    layer_types,
    read_common,
    read_layer_types,
    write_common,
)
from fornax.models.families.family import BASE_NAMES, PRE_NORM_NAMES, Family
from fornax.models.families.reader import ConfigReader
from fornax.models.families.rope_keys import read_rope, write_rope

__all__ = ["OF_IMAGES", "QWEN2", "QWEN3", "read_windows", "write_windows"]

OF_IMAGES = ("mrope_section", "mrope_interleaved")
"""Keys of rope: which frequencies follow height and width. In text all positions are one."""


def _read_shared(reader: ConfigReader) -> dict[str, Any]:
    fields = read_common(reader, tied=False)
    return {
        **fields,
        "rope": read_rope(
            reader,
            fields["max_position_embeddings"],
            aliases={"mrope": "default"},
            ignored=OF_IMAGES,
        ),
        **read_windows(reader, fields["num_layers"]),
    }


def _write_shared(config: DecoderConfig) -> dict[str, object]:
    return {**write_common(config), **write_rope(config.rope), **write_windows(config)}


def read_windows(reader: ConfigReader, layers: int) -> dict[str, Any]:
    """`sliding_window` and `attention_pattern`: windows from some layer on, if any.

    Raises:
      ConfigError: for a type of layer that is not supported, or a missing window.
    """
    slides = reader.take("use_sliding_window", False)
    window = reader.take("sliding_window", 4_096)
    first = reader.take("max_window_layers", 28)
    default = [
        "sliding_attention"
        if slides and window is not None and index >= first
        else "full_attention"
        for index in range(layers)
    ]
    return read_layer_types(reader, layers, window if slides else None, default)


def write_windows(config: DecoderConfig) -> dict[str, object]:
    """The inverse of `read_windows`."""
    types = layer_types(config)
    first = types.index("sliding_attention") if config.sliding_window else config.num_layers
    return {
        "use_sliding_window": config.sliding_window is not None,
        "sliding_window": config.sliding_window,
        "max_window_layers": first,
        "layer_types": types,
    }


def _read_qwen2(reader: ConfigReader) -> DecoderConfig:
    return DecoderConfig(**_read_shared(reader), qkv_bias=True)


def _read_qwen3(reader: ConfigReader) -> DecoderConfig:
    fields = _read_shared(reader)
    bias = reader.take("attention_bias", False)
    if fields["head_dim"] is None:
        fields["head_dim"] = 128
    return DecoderConfig(**fields, qk_norm="head", qkv_bias=bias, attention_output_bias=bias)


def _write_qwen3(config: DecoderConfig) -> dict[str, object]:
    return {**_write_shared(config), "attention_bias": config.qkv_bias}


_family = functools.partial(Family, names={**BASE_NAMES, **PRE_NORM_NAMES})
QWEN2 = _family("qwen2", "Qwen2ForCausalLM", _read_qwen2, _write_shared)
QWEN3 = _family("qwen3", "Qwen3ForCausalLM", _read_qwen3, _write_qwen3)
