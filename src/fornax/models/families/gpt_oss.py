"""gpt-oss: experts with biases and a clipped activation, attention sinks, alternating windows."""

from dataclasses import replace
from typing import Any

from fornax.config.errors import ConfigError
from fornax.models.config import DecoderConfig
from fornax.models.experts_config import ExpertsConfig
from fornax.models.families.common import (
    layer_types,
    read_common,
    read_layer_types,
    write_common,
)
from fornax.models.families.family import BASE_NAMES, PRE_NORM_NAMES, ExpertsTensor, Family
from fornax.models.families.reader import ConfigReader
from fornax.models.families.rope_keys import read_rope, write_rope, write_rope_mapping
from fornax.models.rope_config import RopeConfig, YarnScaling

__all__ = ["GPT_OSS"]

_THETA = 150_000.0
_SCALING = YarnScaling(factor=32.0, original_max_position_embeddings=4_096, truncate=False)
"""What the architecture takes where a file says nothing."""


def _read(reader: ConfigReader) -> DecoderConfig:
    fields = read_common(reader, tied=False, eps=1e-5)
    layers = fields["num_layers"]
    default = ["full_attention" if index % 2 else "sliding_attention" for index in range(layers)]
    windows = read_layer_types(reader, layers, reader.take("sliding_window", 128), default)
    bias = reader.take("attention_bias", True)
    return DecoderConfig(
        **fields,
        **windows,
        rope=_read_rope(reader, fields["max_position_embeddings"]),
        qkv_bias=bias,
        attention_output_bias=bias,
        attention_sinks=True,
        experts=_read_experts(reader, fields["intermediate_size"]),
    )


def _read_rope(reader: ConfigReader, limit: int) -> RopeConfig:
    rope = read_rope(reader, limit, theta=_THETA)
    reader.take("initial_context_length", None)  # the scaling names it too
    given = (reader.take(key, None) for key in ("rope_scaling", "rope_parameters"))
    return rope if any(given) else replace(rope, scaling=_SCALING)


def _read_experts(reader: ConfigReader, width: int) -> ExpertsConfig:
    count = reader.take("num_experts_per_tok", 4)
    reader.expect("experts_per_token", count)  # a second name in the first releases
    reader.take("output_router_logits", False)  # whether the balance loss is part of the output
    return ExpertsConfig(
        num_experts=reader.take("num_experts" if "num_experts" in reader else "num_local_experts"),
        experts_per_token=count,
        intermediate_size=width,
        router_bias=True,
        bias=True,
        clip=reader.take("swiglu_limit", 7.0),
        clip_gain=reader.take("swiglu_alpha", 1.702),
        balance_loss=reader.take("router_aux_loss_coef", 0.001),
    )


def _write(config: DecoderConfig) -> dict[str, Any]:
    if config.experts is None:
        raise ConfigError("experts=None")
    experts, rope = config.experts, write_rope(config.rope)
    if config.rope.scaling is None:
        rope = {"rope_parameters": write_rope_mapping(config.rope)}
    return {
        **write_common(config),
        **rope,
        "layer_types": layer_types(config),
        "sliding_window": config.sliding_window,
        "attention_bias": config.qkv_bias,
        "num_local_experts": experts.num_experts,
        "num_experts_per_tok": experts.experts_per_token,
        "intermediate_size": experts.intermediate_size,
        "swiglu_limit": experts.clip,
        "swiglu_alpha": experts.clip_gain,
        "router_aux_loss_coef": experts.balance_loss,
    }


_MLP = "model.layers.{layer}.mlp"
_NAMES = {
    **BASE_NAMES,
    **PRE_NORM_NAMES,
    "layers/attention/sinks": "model.layers.{layer}.self_attn.sinks",
    "layers/experts/router/kernel": f"{_MLP}.router.weight",
    "layers/experts/router/bias": f"{_MLP}.router.bias",
    **{
        f"layers/experts/{part}/{kind}": ExpertsTensor(
            f"{_MLP}.experts.gate_up_proj{ending}", interleaved=True
        )
        for kind, ending in (("kernel", ""), ("bias", "_bias"))
        for part in ("gate", "up")
    },
    "layers/experts/down/kernel": ExpertsTensor(f"{_MLP}.experts.down_proj"),
    "layers/experts/down/bias": ExpertsTensor(f"{_MLP}.experts.down_proj_bias"),
}

GPT_OSS = Family("gpt_oss", "GptOssForCausalLM", _read, _write, _NAMES)
