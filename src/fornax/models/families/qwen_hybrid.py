"""Qwen3-Next and Qwen3.5: gated DeltaNet in most layers, gated attention in the others."""

from collections.abc import Mapping
from typing import Any

from fornax.config.errors import ConfigError
from fornax.models.config import DecoderConfig
from fornax.models.delta_config import GatedDeltaConfig
from fornax.models.families.common import (
    LINEAR_KINDS,
    layer_types,
    read_common,
    read_layer_types,
    write_common,
)
from fornax.models.families.family import (
    BASE_NAMES,
    PRE_NORM_NAMES,
    ExpertsTensor,
    Family,
    GroupedRows,
    MTPFiles,
    TensorName,
    expert_names,
    module_names,
)
from fornax.models.families.mixtures import read_sparse, write_sparse
from fornax.models.families.qwen import OF_IMAGES
from fornax.models.families.reader import ConfigReader
from fornax.models.families.rope_keys import read_rope, write_rope

__all__ = ["QWEN3_5", "QWEN3_5_MOE", "QWEN3_NEXT"]


def _read_shared(
    reader: ConfigReader, *, kv_heads: int, width_key: str = "intermediate_size"
) -> dict[str, Any]:
    """The fields that all have; `kv_heads` is the family's default."""
    fields = read_common(reader, tied=False, width_key=width_key)
    layers = fields["num_layers"]
    interval = reader.take("full_attention_interval", 4)
    default = [
        "linear_attention" if (index + 1) % interval else "full_attention"
        for index in range(layers)
    ]
    kinds = read_layer_types(reader, layers, None, default, LINEAR_KINDS)
    delta = GatedDeltaConfig(
        num_key_heads=reader.take("linear_num_key_heads", 16),
        num_value_heads=reader.take("linear_num_value_heads", 32),
        key_dim=reader.take("linear_key_head_dim", 128),
        value_dim=reader.take("linear_value_head_dim", 128),
        conv_width=reader.take("linear_conv_kernel_dim", 4),
    )
    limit = fields["max_position_embeddings"]
    bias = reader.take("attention_bias", False)
    reader.expect("attn_output_gate", True)
    reader.expect("use_sliding_window", False)
    return {
        **fields,
        **kinds,
        "num_kv_heads": fields["num_kv_heads"] or kv_heads,
        "head_dim": fields["head_dim"] or 256,
        "gated_delta": delta if kinds else None,
        "rope": read_rope(reader, limit, partial=True, fraction=0.25, ignored=OF_IMAGES),
        "qkv_bias": bias,
        "attention_output_bias": bias,
        "attention_gate": True,
        "qk_norm": "head",
        "norm_unit_offset": True,
    }


def _write_shared(config: DecoderConfig) -> dict[str, Any]:
    keys = {
        **write_common(config),
        **write_rope(config.rope),
        "partial_rotary_factor": config.rope.fraction,
        "attention_bias": config.qkv_bias,
        "layer_types": layer_types(config),
    }
    delta = config.gated_delta
    if delta is None:
        return keys
    return {
        **keys,
        "linear_num_key_heads": delta.num_key_heads,
        "linear_num_value_heads": delta.num_value_heads,
        "linear_key_head_dim": delta.key_dim,
        "linear_value_head_dim": delta.value_dim,
        "linear_conv_kernel_dim": delta.conv_width,
    }


def _read_mixture(reader: ConfigReader, fields: dict[str, Any]) -> DecoderConfig:
    width = reader.take("shared_expert_intermediate_size", 512)
    shared = {"shared_intermediate_size": width, "shared_gate": True}
    sparse = read_sparse(reader, fields["num_layers"], normalize=True, **shared)
    return DecoderConfig(**fields, **sparse)


def _write_mixture(config: DecoderConfig) -> dict[str, Any]:
    if config.experts is None:
        raise ConfigError("experts=None")
    width = config.experts.shared_intermediate_size
    return {
        **_write_shared(config),
        **write_sparse(config),
        "shared_expert_intermediate_size": width,
    }


def _read_next(reader: ConfigReader) -> DecoderConfig:
    return _read_mixture(reader, _read_shared(reader, kv_heads=2))


def _read_3_5(reader: ConfigReader) -> DecoderConfig:
    _take_training(reader)
    return DecoderConfig(**_read_shared(reader, kv_heads=4))


def _read_3_5_moe(reader: ConfigReader) -> DecoderConfig:
    _take_training(reader)
    reader.expect("norm_topk_prob", True)
    reader.expect("decoder_sparse_step", 1)
    reader.expect("mlp_only_layers", [], None)
    reader.take("intermediate_size", None)  # of dense layers, which there are none of
    fields = _read_shared(reader, kv_heads=2, width_key="moe_intermediate_size")
    return _read_mixture(reader, fields)


def _write_3_5_moe(config: DecoderConfig) -> dict[str, Any]:
    keys = _write_mixture(config)
    del keys["intermediate_size"]
    return keys


def _take_training(reader: ConfigReader) -> None:
    reader.take("mamba_ssm_dtype", None)  # ours is float32
    reader.take("mtp_num_hidden_layers", 0)  # see `Family.mtp`
    reader.take("mtp_use_dedicated_embeddings", False)


_DELTA = "model.layers.{layer}.linear_attn"
_EXPERTS = "model.layers.{layer}.mlp.experts"
_SHARED_NAMES: dict[str, TensorName] = {
    **BASE_NAMES,
    **PRE_NORM_NAMES,
    **{f"layers/gated_delta/{x}_conv/kernel": f"{_DELTA}.conv1d.weight" for x in "qkv"},
    "layers/gated_delta/decay_bias": f"{_DELTA}.dt_bias",
    "layers/gated_delta/log_rate": f"{_DELTA}.A_log",
    "layers/gated_delta/norm/scale": f"{_DELTA}.norm.weight",
    "layers/gated_delta/o/kernel": f"{_DELTA}.out_proj.weight",
}
_EXPERT_NAMES = expert_names("mlp", gate="gate_proj", up="up_proj", down="down_proj")
_NEXT_NAMES: dict[str, TensorName] = {
    **_SHARED_NAMES,
    **_EXPERT_NAMES,
    **{
        f"layers/gated_delta/{part}/kernel": GroupedRows(f"{_DELTA}.in_proj_{tensor}.weight")
        for tensor, parts in (("qkvz", ("q", "k", "v", "gate")), ("ba", ("beta", "decay")))
        for part in parts
    },
}
_3_5_NAMES: dict[str, TensorName] = {
    **_SHARED_NAMES,
    **{
        f"layers/gated_delta/{part}/kernel": f"{_DELTA}.in_proj_{tensor}.weight"
        for tensor, parts in (("qkv", "qkv"), ("z", ("gate",)), ("b", ("beta",)), ("a", ("decay",)))
        for part in parts
    },
}
_3_5_MOE_NAMES: dict[str, TensorName] = {**_3_5_NAMES, **_EXPERT_NAMES}
_RELEASED_MOE_NAMES: dict[str, TensorName] = {
    **_3_5_MOE_NAMES,
    **{
        f"layers/experts/{part}/kernel": ExpertsTensor(f"{_EXPERTS}.{tensor}", transposed=True)
        for part, tensor in (
            ("gate", "gate_up_proj"),
            ("up", "gate_up_proj"),
            ("down", "down_proj"),
        )
    },
}
_MODULE_PARTS = {
    "embed_norm/scale": "mtp.pre_fc_norm_embedding.weight",
    "hidden_norm/scale": "mtp.pre_fc_norm_hidden.weight",
    "projection/kernel": "mtp.fc.weight",
    "norm/scale": "mtp.norm.weight",
}


def _with_modules(names: Mapping[str, TensorName]) -> dict[str, TensorName]:
    """A family's names, with those of its module."""
    return {**names, **module_names(names, _MODULE_PARTS, "mtp.layers.{module}")}


_MTP = MTPFiles(start="mtp.", most=1)
_MTP_3_5 = MTPFiles(start="mtp.", key="mtp_num_hidden_layers", most=1)

QWEN3_NEXT = Family(
    "qwen3_next",
    "Qwen3NextForCausalLM",
    _read_next,
    _write_mixture,
    _with_modules(_NEXT_NAMES),
    _MTP,
)
QWEN3_5 = Family(
    "qwen3_5_text",
    "Qwen3_5ForCausalLM",
    _read_3_5,
    _write_shared,
    _with_modules(_3_5_NAMES),
    _MTP_3_5,
)
QWEN3_5_MOE = Family(
    "qwen3_5_moe_text",
    "Qwen3_5MoeForCausalLM",
    _read_3_5_moe,
    _write_3_5_moe,
    _with_modules(_3_5_MOE_NAMES),
    _MTP_3_5,
    _with_modules(_RELEASED_MOE_NAMES),
)
