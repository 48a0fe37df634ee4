"""Llama 4 text: chunked layers that rotate, full ones that do not, experts with weighted inputs."""

from typing import Any

from fornax.config.errors import ConfigError
from fornax.models.config import DecoderConfig, LayerKind, QueryScaling
from fornax.models.experts_config import ExpertsConfig
from fornax.models.families.common import read_common, shortest_pattern, write_common
from fornax.models.families.family import BASE_NAMES, PRE_NORM_NAMES, ExpertsTensor, Family
from fornax.models.families.reader import ConfigReader, as_list
from fornax.models.families.rope_keys import read_rope, write_rope_mapping

__all__ = ["LLAMA4"]

_KINDS = {"full_attention": "full", "chunked_attention": "chunked"}


def _read(reader: ConfigReader) -> DecoderConfig:
    fields = read_common(reader, tied=False, eps=1e-5, width_key="intermediate_size_mlp")
    fields["head_dim"] = fields["head_dim"] or 128
    layers, limit = fields["num_layers"], fields["max_position_embeddings"]
    rotates = _read_rotating(reader, layers)
    bias = reader.take("attention_bias", False)
    reader.take("for_llm_compressor", None)  # whether experts lie apart while it compresses them
    return DecoderConfig(
        **fields,
        **_read_chunks(reader, rotates),
        **_read_experts(reader, layers),
        rope=read_rope(reader, limit, theta=500_000.0, interleaved=True),
        rope_pattern=shortest_pattern(rotates),
        query_scaling=_read_scaling(reader),
        qk_norm="unweighted" if reader.take("use_qk_norm", True) else "none",
        qkv_bias=bias,
        attention_output_bias=bias,
    )


def _read_rotating(reader: ConfigReader, layers: int) -> list[bool]:
    every = reader.take("no_rope_layer_interval", 4)
    given = reader.take("no_rope_layers", None)  # which do: 1 for a layer that rotates
    if not given:
        return [(index + 1) % every != 0 for index in range(layers)]
    return [bool(rotates) for rotates in as_list(given, "no_rope_layers", reader, layers)]


def _read_chunks(reader: ConfigReader, rotates: list[bool]) -> dict[str, Any]:
    chunk = reader.take("attention_chunk_size", 8_192)
    types = reader.take("layer_types", None)
    if types is None:
        types = ["chunked_attention" if each else "full_attention" for each in rotates]
    types = as_list(types, "layer_types", reader, len(rotates))
    for kind in types:
        if kind not in _KINDS:
            raise ConfigError(
                f"{reader.source}: layer type {kind!r} is not supported; use one of "
                f"{', '.join(_KINDS)}"
            )
    pattern = shortest_pattern([_KINDS[kind] for kind in types])
    return {
        "attention_pattern": pattern,
        "attention_chunk": chunk if "chunked" in pattern else None,
    }


def _read_scaling(reader: ConfigReader) -> QueryScaling | None:
    tuned = reader.take("attn_temperature_tuning", True)
    length, beta = reader.take("floor_scale", 8_192), reader.take("attn_scale", 0.1)
    return QueryScaling(beta=beta, length=length, shift=1, layers="unrotated") if tuned else None


def _read_experts(reader: ConfigReader, layers: int) -> dict[str, Any]:
    step, given = reader.take("interleave_moe_layer_step", 1), reader.take("moe_layers", None)
    sparse = set(range(step - 1, layers, step) if given is None else given)
    width = reader.take("intermediate_size", 8_192)
    reader.expect("router_jitter_noise", 0, 0.0)
    reader.take("output_router_logits", False)  # whether the balance loss is part of the output
    experts = ExpertsConfig(
        num_experts=reader.take("num_local_experts", 16),
        experts_per_token=reader.take("num_experts_per_tok", 1),
        intermediate_size=width,
        shared_intermediate_size=width,
        score="sigmoid",
        normalize=False,
        weigh="input",
        balance_loss=reader.take("router_aux_loss_coef", 0.001),
    )
    pattern = ["experts" if index in sparse else "mlp" for index in range(layers)]
    some = "experts" in pattern
    return {"experts": experts if some else None, "mlp_pattern": shortest_pattern(pattern)}


def _write(config: DecoderConfig) -> dict[str, Any]:
    kinds, common = config.layer_kinds(), write_common(config)
    experts, scaling = config.experts, config.query_scaling
    width = config.intermediate_size if experts is None else experts.intermediate_size
    keys: dict[str, Any] = {
        **common,
        "rope_parameters": write_rope_mapping(config.rope),
        "intermediate_size": width,
        "intermediate_size_mlp": common["intermediate_size"],
        "moe_layers": [index for index, kind in enumerate(kinds) if kind.mlp == "experts"],
        "no_rope_layers": [int(kind.rope != "none") for kind in kinds],
        "layer_types": [_layer_type(kind) for kind in kinds],
        "attention_chunk_size": config.attention_chunk or 8_192,
        "attn_temperature_tuning": scaling is not None,
        "use_qk_norm": config.qk_norm == "unweighted",
        "attention_bias": config.qkv_bias,
    }
    if scaling is not None:
        keys |= {"floor_scale": scaling.length, "attn_scale": scaling.beta}
    if experts is not None:
        keys |= {
            "num_local_experts": experts.num_experts,
            "num_experts_per_tok": experts.experts_per_token,
            "router_aux_loss_coef": experts.balance_loss,
        }
    return keys


def _layer_type(kind: LayerKind) -> str:
    return "chunked_attention" if kind.chunked else "full_attention"


_MLP = "model.layers.{layer}.feed_forward"
_NAMES = {
    **BASE_NAMES,
    **PRE_NORM_NAMES,
    **{f"layers/mlp/{x}/kernel": f"{_MLP}.{x}_proj.weight" for x in ("gate", "up", "down")},
    "layers/experts/router/kernel": f"{_MLP}.router.weight",
    "layers/experts/gate/kernel": ExpertsTensor(f"{_MLP}.experts.gate_up_proj"),
    "layers/experts/up/kernel": ExpertsTensor(f"{_MLP}.experts.gate_up_proj"),
    "layers/experts/down/kernel": ExpertsTensor(f"{_MLP}.experts.down_proj"),
    **{
        f"layers/experts/shared/{x}/kernel": f"{_MLP}.shared_expert.{x}_proj.weight"
        for x in ("gate", "up", "down")
    },
}

LLAMA4 = Family("llama4_text", "Llama4ForCausalLM", _read, _write, _NAMES)
