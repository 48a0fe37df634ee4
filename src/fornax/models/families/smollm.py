"""SmolLM3: Llama in which some layers do not rotate (NoPE), and may slide."""

from typing import Any

from fornax.models.config import DecoderConfig
from fornax.models.families.common import (
    layer_types,
    read_common,
    read_layer_types,
    shortest_pattern,
    write_common,
)
from fornax.models.families.family import BASE_NAMES, PRE_NORM_NAMES, Family
from fornax.models.families.reader import ConfigReader, as_list
from fornax.models.families.rope_keys import read_rope, write_rope

__all__ = ["SMOLLM3"]


def _read(reader: ConfigReader) -> DecoderConfig:
    fields = read_common(reader, tied=True)
    layers = fields["num_layers"]
    every = reader.take("no_rope_layer_interval", 4)
    listed = reader.take("no_rope_layers", None)
    if listed is None:
        listed = [int((index + 1) % every != 0) for index in range(layers)]
    rotates = [bool(flag) for flag in as_list(listed, "no_rope_layers", reader, layers)]
    slides, window = reader.take("use_sliding_window", False), reader.take("sliding_window", None)
    reader.take("max_window_layers", None)  # written by the library, read by nothing
    default = [
        "sliding_attention" if slides and window is not None and not rotated else "full_attention"
        for rotated in rotates
    ]
    bias = reader.take("attention_bias", False)
    return DecoderConfig(
        **fields,
        rope=read_rope(reader, fields["max_position_embeddings"], theta=2_000_000.0),
        rope_pattern=shortest_pattern(rotates),
        **read_layer_types(reader, layers, window if slides else None, default),
        qkv_bias=bias,
        attention_output_bias=bias,
        mlp_bias=reader.take("mlp_bias", False),
    )


def _write(config: DecoderConfig) -> dict[str, Any]:
    return {
        **write_common(config),
        **write_rope(config.rope),
        "no_rope_layers": [int(kind.rope != "none") for kind in config.layer_kinds()],
        "layer_types": layer_types(config),
        "use_sliding_window": config.sliding_window is not None,
        "sliding_window": config.sliding_window,
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
    }


SMOLLM3 = Family("smollm3", "SmolLM3ForCausalLM", _read, _write, {**BASE_NAMES, **PRE_NORM_NAMES})
