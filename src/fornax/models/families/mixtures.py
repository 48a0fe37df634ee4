"""Mixtures of experts: Mixtral, MiniMax-M2, Qwen2-MoE, Qwen3-MoE and OLMoE."""

from typing import Any

from fornax.config.errors import ConfigError
from fornax.models.config import DecoderConfig
from fornax.models.experts_config import ExpertsConfig
from fornax.models.families.common import (
    read_common,
    shortest_pattern,
    write_common,
)
from fornax.models.families.family import BASE_NAMES, PRE_NORM_NAMES, Family, expert_names
from fornax.models.families.qwen import read_windows, write_windows
from fornax.models.families.reader import ConfigReader
from fornax.models.families.rope_keys import read_rope, write_rope, write_rope_mapping

__all__ = [
    "MINIMAX_M2",
    "MIXTRAL",
    "OLMOE",
    "QWEN2_MOE",
    "QWEN3_MOE",
    "read_experts",
    "read_sparse",
    "write_experts",
    "write_sparse",
]


def read_experts(reader: ConfigReader, count: str, **more: Any) -> ExpertsConfig:
    """The keys of routers that these families share.

    Args:
      reader: the file.
      count: what the family calls the number of experts.
      more: further fields of `ExpertsConfig`.
    """
    reader.expect("router_jitter_noise", 0, 0.0)
    reader.take("output_router_logits", False)  # whether the balance loss is part of the output
    other = "num_local_experts" if count == "num_experts" else "num_experts"
    return ExpertsConfig(
        num_experts=reader.take(other if other in reader and count not in reader else count),
        experts_per_token=reader.take("num_experts_per_tok"),
        balance_loss=reader.take("router_aux_loss_coef", 0.001),
        **more,
    )


def write_experts(config: DecoderConfig, count: str) -> dict[str, Any]:
    """The inverse of `read_experts`."""
    experts = _experts(config)
    return {
        count: experts.num_experts,
        "num_experts_per_tok": experts.experts_per_token,
        "router_aux_loss_coef": experts.balance_loss,
    }


def _experts(config: DecoderConfig) -> ExpertsConfig:
    if config.experts is None:
        raise ConfigError("experts=None")
    return config.experts


def _read_mixtral(reader: ConfigReader) -> DecoderConfig:
    fields = read_common(reader, tied=False, eps=1e-5)
    window = reader.take("sliding_window", None)
    width = fields["intermediate_size"]
    return DecoderConfig(
        **fields,
        rope=read_rope(reader, fields["max_position_embeddings"], theta=1_000_000.0),
        sliding_window=window,
        attention_pattern=("full",) if window is None else ("sliding",),
        experts=read_experts(reader, "num_local_experts", intermediate_size=width),
    )


def _write_mixtral(config: DecoderConfig) -> dict[str, Any]:
    return {
        **write_common(config),
        **write_rope(config.rope),
        **write_experts(config, "num_local_experts"),
        "intermediate_size": _experts(config).intermediate_size,
        "sliding_window": config.sliding_window,
    }


def _read_minimax_m2(reader: ConfigReader) -> DecoderConfig:
    fields = read_common(reader, tied=False)
    fields["head_dim"] = fields["head_dim"] or 128
    width = fields["intermediate_size"]
    rotated = reader.take("rotary_dim", None)  # the released files' name for the fraction
    fraction = 1.0 if rotated is None else rotated / fields["head_dim"]
    limit = fields["max_position_embeddings"]
    for key in ("num_mtp_modules", "mtp_transformer_layers", "use_mtp"):
        reader.take(key, None)  # modules for further tokens, which files do not hold
    for key, only in _MINIMAX_M2_ONLY.items():
        reader.expect(key, *only)
    reader.expect("attn_type_list", [1] * fields["num_layers"])
    return DecoderConfig(
        **fields,
        rope=read_rope(reader, limit, theta=5_000_000.0, partial=True, fraction=fraction),
        qk_norm="full",
        experts=read_experts(
            reader,
            "num_local_experts",
            intermediate_size=width,
            score="sigmoid",
            selection_bias=True,
        ),
    )


_MINIMAX_M2_ONLY: dict[str, tuple[Any, ...]] = {
    "qk_norm_type": ("per_layer",),
    "scoring_func": ("sigmoid",),
    "shared_intermediate_size": (0,),
    "sliding_window": (None,),
    "use_qk_norm": (True,),
    "use_routing_bias": (True,),
}
"""Keys of released files that transformers does not read, with the values it computes by."""


def _write_minimax_m2(config: DecoderConfig) -> dict[str, Any]:
    return {
        **write_common(config),
        "rope_parameters": write_rope_mapping(config.rope),
        **write_experts(config, "num_local_experts"),
        "intermediate_size": _experts(config).intermediate_size,
    }


def _read_olmoe(reader: ConfigReader) -> DecoderConfig:
    fields = read_common(reader, tied=False, eps=1e-5)
    bias = reader.take("attention_bias", False)
    width = fields["intermediate_size"]
    return DecoderConfig(
        **fields,
        rope=read_rope(reader, fields["max_position_embeddings"]),
        qkv_bias=bias,
        attention_output_bias=bias,
        qk_norm="full",
        qkv_clip=reader.take("clip_qkv", None),
        experts=read_experts(
            reader,
            "num_experts",
            intermediate_size=width,
            normalize=reader.take("norm_topk_prob", False),
        ),
    )


def _write_olmoe(config: DecoderConfig) -> dict[str, Any]:
    experts = _experts(config)
    return {
        **write_common(config),
        **write_rope(config.rope),
        **write_experts(config, "num_experts"),
        "intermediate_size": experts.intermediate_size,
        "norm_topk_prob": experts.normalize,
        "attention_bias": config.qkv_bias,
        "clip_qkv": config.qkv_clip,
    }


def read_sparse(
    reader: ConfigReader, layers: int, *, normalize: bool = False, **shared: Any
) -> dict[str, Any]:
    """`experts` and `mlp_pattern` of a mixture of Qwen's.

    Args:
      reader: the file.
      layers: how many there are.
      normalize: the family's default for `norm_topk_prob`.
      shared: fields of `ExpertsConfig` for the shared expert.
    """
    step = reader.take("decoder_sparse_step", 1)
    dense = set(reader.take("mlp_only_layers", None) or ())
    pattern = [
        "mlp" if index in dense or (index + 1) % step else "experts" for index in range(layers)
    ]
    experts = read_experts(
        reader,
        "num_experts",
        intermediate_size=reader.take("moe_intermediate_size"),
        normalize=reader.take("norm_topk_prob", normalize),
        **shared,
    )
    mlps = shortest_pattern(pattern) if "mlp" in pattern else None
    return {"experts": experts, "mlp_pattern": mlps}


def write_sparse(config: DecoderConfig) -> dict[str, Any]:
    """The inverse of `read_sparse`, the shared expert aside."""
    kinds = config.layer_kinds()
    return {
        **write_experts(config, "num_experts"),
        "moe_intermediate_size": _experts(config).intermediate_size,
        "norm_topk_prob": _experts(config).normalize,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [index for index, kind in enumerate(kinds) if kind.mlp == "mlp"],
    }


def _read_qwen(reader: ConfigReader, **shared: Any) -> dict[str, Any]:
    """The keys that Qwen2-MoE and Qwen3-MoE share; `shared` is of the shared expert."""
    fields = read_common(reader, tied=False)
    fields["rope"] = read_rope(reader, fields["max_position_embeddings"])
    return {**fields, **read_sparse(reader, fields["num_layers"], **shared)}


def _write_qwen(config: DecoderConfig) -> dict[str, Any]:
    return {
        **write_common(config),
        **write_rope(config.rope),
        **write_sparse(config),
        "use_sliding_window": config.sliding_window is not None,
        "sliding_window": config.sliding_window,
    }


def _read_qwen2_moe(reader: ConfigReader) -> DecoderConfig:
    width = reader.take("shared_expert_intermediate_size")
    fields = _read_qwen(reader, shared_intermediate_size=width, shared_gate=True)
    kinds = read_windows(reader, fields["num_layers"])
    bias = reader.take("qkv_bias", True)
    return DecoderConfig(**fields, **kinds, qkv_bias=bias)


def _write_qwen2_moe(config: DecoderConfig) -> dict[str, Any]:
    return {
        **_write_qwen(config),
        **write_windows(config),
        "shared_expert_intermediate_size": _experts(config).shared_intermediate_size,
        "qkv_bias": config.qkv_bias,
    }


def _read_qwen3_moe(reader: ConfigReader) -> DecoderConfig:
    fields = _read_qwen(reader)
    bias = reader.take("attention_bias", False)
    slides = reader.take("use_sliding_window", False)
    window = reader.take("sliding_window", 4_096)
    reader.take("max_window_layers", None)  # no layer goes by it
    window = window if slides else None
    return DecoderConfig(
        **fields,
        qk_norm="head",
        qkv_bias=bias,
        attention_output_bias=bias,
        sliding_window=window,
        attention_pattern=("full",) if window is None else ("sliding",),
    )


def _write_qwen3_moe(config: DecoderConfig) -> dict[str, Any]:
    return {**_write_qwen(config), "attention_bias": config.qkv_bias}


_MIXTRAL_NAMES = {
    **BASE_NAMES,
    **PRE_NORM_NAMES,
    **expert_names("block_sparse_moe", gate="w1", up="w3", down="w2"),
}
_NAMES = {
    **BASE_NAMES,
    **PRE_NORM_NAMES,
    **expert_names("mlp", gate="gate_proj", up="up_proj", down="down_proj"),
}

_MINIMAX_M2_NAMES = {
    **_MIXTRAL_NAMES,
    "layers/experts/selection_bias": (
        "model.layers.{layer}.block_sparse_moe.e_score_correction_bias"
    ),
}

MINIMAX_M2 = Family(
    "minimax_m2", "MiniMaxM2ForCausalLM", _read_minimax_m2, _write_minimax_m2, _MINIMAX_M2_NAMES
)
MIXTRAL = Family("mixtral", "MixtralForCausalLM", _read_mixtral, _write_mixtral, _MIXTRAL_NAMES)
OLMOE = Family("olmoe", "OlmoeForCausalLM", _read_olmoe, _write_olmoe, _NAMES)
QWEN2_MOE = Family("qwen2_moe", "Qwen2MoeForCausalLM", _read_qwen2_moe, _write_qwen2_moe, _NAMES)
QWEN3_MOE = Family("qwen3_moe", "Qwen3MoeForCausalLM", _read_qwen3_moe, _write_qwen3_moe, _NAMES)
