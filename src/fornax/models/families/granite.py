"""Granite 3 and 4: multipliers of embeddings, branches, scores and logits; in 4 Mamba-2 layers."""

import functools
from typing import Any

from fornax.config.errors import ConfigError
from fornax.models.config import DecoderConfig
from fornax.models.experts_config import ExpertsConfig
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
    TensorName,
)
from fornax.models.families.mamba import expansion, mamba_names, read_limit
from fornax.models.families.mixtures import read_experts, write_experts
from fornax.models.families.reader import ConfigReader
from fornax.models.families.rope_keys import read_rope, write_rope
from fornax.models.mamba_config import Mamba2Config

__all__ = ["GRANITE", "GRANITE_HYBRID", "GRANITE_MOE", "GRANITE_MOE_SHARED"]

_KINDS = LINEAR_KINDS | {"mamba": "linear", "attention": "full"}
"""With the names of released files."""


def _read_shared(reader: ConfigReader, *, biased_mlp: bool = False) -> dict[str, Any]:
    """The fields that all have."""
    fields = read_common(reader, tied=False)
    bias = reader.take("attention_bias", False)
    return {
        **fields,
        "rope": read_rope(reader, fields["max_position_embeddings"]),
        "qkv_bias": bias,
        "attention_output_bias": bias,
        "mlp_bias": reader.take("mlp_bias", False) if biased_mlp else False,
        "embedding_multiplier": _multiplier(reader, "embedding_multiplier"),
        "residual_multiplier": _multiplier(reader, "residual_multiplier"),
        "logits_scaling": _multiplier(reader, "logits_scaling"),
        "query_pre_attn_scalar": _multiplier(reader, "attention_multiplier") ** -2,
    }


def _multiplier(reader: ConfigReader, key: str) -> float:
    value = reader.take(key, 1.0)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ConfigError(f"{reader.source}: {key}={value!r} must be a number above 0")
    return float(value)


def _write_shared(config: DecoderConfig) -> dict[str, Any]:
    return {
        **write_common(config),
        **write_rope(config.rope),
        "attention_bias": config.qkv_bias,
        "embedding_multiplier": config.embedding_multiplier,
        "residual_multiplier": config.residual_multiplier,
        "logits_scaling": config.logits_scaling,
        "attention_multiplier": config.attention_scale,
    }


def _read_dense(reader: ConfigReader) -> DecoderConfig:
    return DecoderConfig(**_read_shared(reader, biased_mlp=True))


def _write_dense(config: DecoderConfig) -> dict[str, Any]:
    return {**_write_shared(config), "mlp_bias": config.mlp_bias}


def _read_mixture(reader: ConfigReader, *, shared: bool) -> DecoderConfig:
    fields = _read_shared(reader)
    width = (reader.take("shared_intermediate_size", 0) or None) if shared else None
    return DecoderConfig(**fields, experts=_read_experts(reader, fields, width))


def _read_experts(
    reader: ConfigReader, fields: dict[str, Any], shared: int | None
) -> ExpertsConfig:
    return read_experts(
        reader,
        "num_local_experts",
        intermediate_size=fields["intermediate_size"],
        shared_intermediate_size=shared,
    )


def _write_mixture(config: DecoderConfig, *, shared: bool) -> dict[str, Any]:
    if config.experts is None:
        raise ConfigError("experts=None")
    width = config.experts.shared_intermediate_size or 0
    return {
        **_write_shared(config),
        **write_experts(config, "num_local_experts"),
        "intermediate_size": config.experts.intermediate_size,
        **({"shared_intermediate_size": width} if shared else {}),
    }


def _read_hybrid(reader: ConfigReader) -> DecoderConfig:
    fields = _read_shared(reader)
    layers = fields["num_layers"]
    kinds = read_layer_types(reader, layers, None, ["linear_attention"] * layers, _KINDS)
    mamba = _read_mamba(reader, fields["hidden_size"])
    positions = reader.take("position_embedding_type", None) or "nope"
    if positions not in ("nope", "rope"):
        raise ConfigError(
            f"{reader.source}: position_embedding_type={positions!r} is not supported; use rope, "
            "nope or null"
        )
    reader.expect("normalization_function", "rmsnorm")
    width = reader.take("shared_intermediate_size", 1_024)
    if reader.take("num_local_experts", 8):
        mlps: dict[str, Any] = {"experts": _read_experts(reader, fields, width)}
    else:  # the shared MLP is the only one
        fields["intermediate_size"] = width
        for key in ("num_experts_per_tok", "output_router_logits", "router_aux_loss_coef"):
            reader.take(key, None)
        mlps = {}
    return DecoderConfig(
        **fields,
        **kinds,
        **mlps,
        mamba2=mamba if kinds else None,
        rope_pattern=(positions == "rope",),
    )


def _read_mamba(reader: ConfigReader, hidden_size: int) -> Mamba2Config:
    heads, expand = reader.take("mamba_n_heads", 128), reader.take("mamba_expand", 2)
    width = reader.take("mamba_d_head", "auto")
    reader.take("mamba_chunk_size", None)  # how a kernel cuts rows
    return Mamba2Config(
        num_heads=heads,
        head_dim=expand * hidden_size // heads if width == "auto" else width,
        state_dim=reader.take("mamba_d_state", 256),
        num_groups=reader.take("mamba_n_groups", 1),
        conv_width=reader.take("mamba_d_conv", 4),
        conv_bias=reader.take("mamba_conv_bias", True),
        bias=reader.take("mamba_proj_bias", False),
        dt_limit=read_limit(reader),
    )


def _write_hybrid(config: DecoderConfig) -> dict[str, Any]:
    experts = config.experts
    if experts is None:
        mlps = {
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": config.intermediate_size,
        }
    elif experts.shared_intermediate_size is None:
        raise ConfigError("experts.shared_intermediate_size=None")
    else:
        mlps = _write_mixture(config, shared=True)
    rotates = any(kind.rope != "none" for kind in config.layer_kinds())
    return {
        **_write_shared(config),
        **mlps,
        "layer_types": layer_types(config),
        "position_embedding_type": "rope" if rotates else "nope",
        **_write_mamba(config),
    }


def _write_mamba(config: DecoderConfig) -> dict[str, Any]:
    mamba = config.mamba2
    if mamba is None:  # no layer reads them; transformers checks that they go together
        return {"mamba_n_heads": 1, "mamba_expand": 1, "mamba_d_head": config.hidden_size}
    return {
        "mamba_n_heads": mamba.num_heads,
        "mamba_d_head": mamba.head_dim,
        "mamba_expand": expansion(mamba, config.hidden_size),
        "mamba_d_state": mamba.state_dim,
        "mamba_n_groups": mamba.num_groups,
        "mamba_d_conv": mamba.conv_width,
        "mamba_conv_bias": mamba.conv_bias,
        "mamba_proj_bias": mamba.bias,
        "time_step_limit": list(mamba.dt_limit),
    }


_LAYER = "model.layers.{layer}"
_EXPERTS = f"{_LAYER}.block_sparse_moe"
_DENSE_NAMES: dict[str, TensorName] = {**BASE_NAMES, **PRE_NORM_NAMES}
_MIXTURE_NAMES: dict[str, TensorName] = {
    **_DENSE_NAMES,
    "layers/experts/router/kernel": f"{_EXPERTS}.router.layer.weight",
    **{
        f"layers/experts/{part}/kernel": ExpertsTensor(
            f"{_EXPERTS}.{tensor}_linear.weight", transposed=True
        )
        for part, tensor in (("gate", "input"), ("up", "input"), ("down", "output"))
    },
    **{
        f"layers/experts/shared/{part}/kernel": f"{_LAYER}.shared_mlp.{tensor}_linear.weight"
        for part, tensor in (("gate", "input"), ("up", "input"), ("down", "output"))
    },
}
_HYBRID_NAMES: dict[str, TensorName] = {
    **_MIXTURE_NAMES,
    **{
        f"layers/mlp/{part}/kernel": f"{_LAYER}.shared_mlp.{tensor}_linear.weight"
        for part, tensor in (("gate", "input"), ("up", "input"), ("down", "output"))
    },
    **mamba_names(f"{_LAYER}.mamba"),
}

GRANITE = Family("granite", "GraniteForCausalLM", _read_dense, _write_dense, _DENSE_NAMES)
GRANITE_MOE = Family(
    "granitemoe",
    "GraniteMoeForCausalLM",
    functools.partial(_read_mixture, shared=False),
    functools.partial(_write_mixture, shared=False),
    _MIXTURE_NAMES,
)
GRANITE_MOE_SHARED = Family(
    "granitemoeshared",
    "GraniteMoeSharedForCausalLM",
    functools.partial(_read_mixture, shared=True),
    functools.partial(_write_mixture, shared=True),
    _MIXTURE_NAMES,
)
GRANITE_HYBRID = Family(
    "granitemoehybrid", "GraniteMoeHybridForCausalLM", _read_hybrid, _write_hybrid, _HYBRID_NAMES
)
