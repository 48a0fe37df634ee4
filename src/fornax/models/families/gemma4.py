"""Gemma 4 text: other heads in full layers, shared keys, layer inputs, experts beside MLPs."""

from collections.abc import Mapping
from typing import Any

from fornax.config.errors import ConfigError
from fornax.models.config import DecoderConfig, GlobalHeads, LayerInputConfig
from fornax.models.experts_config import ExpertsConfig
from fornax.models.families.common import (
    layer_types,
    read_common,
    read_layer_types,
    write_common,
)
from fornax.models.families.family import BASE_NAMES, SANDWICH_NAMES, ExpertsTensor, Family
from fornax.models.families.reader import ConfigReader
from fornax.models.families.rope_keys import read_two_ropes, write_two_ropes

__all__ = ["GEMMA4"]

_ACTIVATION = "hidden_activation"
_TURNING = 0.25


def _read(reader: ConfigReader) -> DecoderConfig:
    # "vision" says that the tokens of an image see each other.
    reader.expect("use_bidirectional_attention", None, "vision")
    fields = read_common(reader, tied=True, activation_key=_ACTIVATION)
    layers, limit = fields["num_layers"], fields["max_position_embeddings"]
    kinds = read_layer_types(reader, layers, reader.take("sliding_window", 512), _types(layers))
    pattern = kinds.get("attention_pattern", ("full",))
    kinds = _with_full_last(kinds, pattern, layers)
    sliding = "sliding" in kinds.get("attention_pattern", ())
    fields["num_kv_heads"] = fields["num_kv_heads"] or 4
    fields["head_dim"] = fields["head_dim"] or 256
    rope, local = read_two_ropes(
        reader, limit, theta=1_000_000.0, local_theta=10_000.0, turning=_TURNING
    )
    bias = reader.take("attention_bias", False)
    return DecoderConfig(
        **fields,
        **kinds,
        **_read_sharing(reader),
        global_heads=_read_heads(reader, fields, layers, kinds),
        layer_inputs=_read_inputs(reader),
        experts=_read_experts(reader, fields["intermediate_size"]),
        rope=rope,
        local_rope=local if sliding else None,
        qkv_bias=bias,
        attention_output_bias=bias,
        qk_norm="head",
        value_norm=True,
        query_pre_attn_scalar=1.0,
        norm_placement="sandwich",
        scale_embeddings=True,
        layer_scale=True,
        final_logit_softcap=reader.take("final_logit_softcapping", None),
    )


def _types(layers: int) -> list[str]:
    return ["full_attention" if (n + 1) % 6 == 0 else "sliding_attention" for n in range(layers)]


def _with_full_last(kinds: dict[str, Any], pattern: tuple[str, ...], layers: int) -> dict[str, Any]:
    """The last layer is full, whatever the file says."""
    attends = [pattern[index % len(pattern)] for index in range(layers)]
    if attends[-1] == "full":
        return kinds
    if "sliding" not in attends[:-1]:
        return {}
    return {**kinds, "attention_pattern": (*attends[:-1], "full")}


def _read_heads(
    reader: ConfigReader, fields: Mapping[str, Any], layers: int, kinds: Mapping[str, Any]
) -> GlobalHeads | None:
    """The heads of full layers: from keys of their own, or from overrides of each full layer."""
    tied = reader.take("attention_k_eq_v", False)
    width = reader.take("global_head_dim", 512)
    count = reader.take("num_global_key_value_heads", None)
    count = count if tied and count is not None else fields["num_kv_heads"]
    overrides = reader.take("per_layer_config", None)
    if overrides is not None:
        pattern = kinds.get("attention_pattern", ("full",))
        full = [n for n in range(layers) if pattern[n % len(pattern)] == "full"]
        own = {"head_dim": fields["head_dim"], "num_key_value_heads": fields["num_kv_heads"]}
        given = [{**own, **overrides.get(str(n), overrides.get(n, {}))} for n in full]
        known = {str(n) for n in full}
        if any(str(n) not in known for n in overrides) or any(one != given[0] for one in given):
            raise ConfigError(
                f"{reader.source}: per_layer_config={overrides!r} is not supported; only the same "
                "head_dim and num_key_value_heads for all full layers, and none for others, are"
            )
        if set(given[0]) != set(own):
            extra = ", ".join(sorted(set(given[0]) - set(own)))
            raise ConfigError(
                f"{reader.source}: per_layer_config sets {extra}, which is not supported; only "
                "head_dim and num_key_value_heads are"
            )
        width, count = given[0]["head_dim"], given[0]["num_key_value_heads"]
    if (width, count, tied) == (fields["head_dim"], fields["num_kv_heads"], False):
        return None
    return GlobalHeads(head_dim=width, num_kv_heads=count, keys_as_values=tied)


def _read_sharing(reader: ConfigReader) -> dict[str, Any]:
    shared = reader.take("num_kv_shared_layers", 0)
    wide = reader.take("use_double_wide_mlp", False)  # of layers that share
    return {"shared_kv_layers": shared, "wide_shared_mlp": bool(wide and shared)}


def _read_inputs(reader: ConfigReader) -> LayerInputConfig | None:
    rows = reader.take("vocab_size_per_layer_input", 262_144)
    width = reader.take("hidden_size_per_layer_input", 256)
    return LayerInputConfig(vocab_size=rows, width=width) if width else None


def _read_experts(reader: ConfigReader, shared: int) -> ExpertsConfig | None:
    keys = ("num_experts", "top_k_experts", "moe_intermediate_size")
    if not reader.take("enable_moe_block", False):
        for key in keys:  # of no layer
            reader.take(key, None)
        return None
    count, chosen, width = (reader.take(key) for key in keys)
    return ExpertsConfig(
        num_experts=count,
        experts_per_token=chosen,
        intermediate_size=width,
        shared_intermediate_size=shared,
        separate_norms=True,
    )


def _write(config: DecoderConfig) -> dict[str, Any]:
    wide, inputs, experts = config.global_heads, config.layer_inputs, config.experts
    keys: dict[str, Any] = {
        **write_common(config, activation_key=_ACTIVATION),
        **write_two_ropes(config.rope, config.local_rope or config.rope),
        "attention_bias": config.qkv_bias,
        "attention_k_eq_v": wide is not None and wide.keys_as_values,
        "enable_moe_block": experts is not None,
        "final_logit_softcapping": config.final_logit_softcap,
        "global_head_dim": config.head_width if wide is None else wide.head_dim,
        "hidden_size_per_layer_input": 0 if inputs is None else inputs.width,
        "layer_types": layer_types(config),
        "num_global_key_value_heads": None if wide is None else wide.num_kv_heads,
        "num_kv_shared_layers": config.shared_kv_layers,
        "sliding_window": config.sliding_window or 512,
        "use_bidirectional_attention": None,
        "use_double_wide_mlp": config.wide_shared_mlp,
        "vocab_size_per_layer_input": config.vocab_size if inputs is None else inputs.vocab_size,
    }
    if experts is not None:
        keys |= {
            "intermediate_size": experts.shared_intermediate_size,
            "num_experts": experts.num_experts,
            "top_k_experts": experts.experts_per_token,
            "moe_intermediate_size": experts.intermediate_size,
        }
    return keys


_LAYER = "model.layers.{layer}"
_ATTENTION = {
    path.removeprefix("layers/attention/"): name
    for path, name in BASE_NAMES.items()
    if path.startswith("layers/attention/")
}
_NAMES = {
    **BASE_NAMES,
    **SANDWICH_NAMES,
    **{
        f"layers/{form}attention/{path}": name
        for form in ("global_", "shared_", "global_shared_")
        for path, name in _ATTENTION.items()
    },
    **{
        f"layers/{part}/{x}/kernel": f"{_LAYER}.mlp.{x}_proj.weight"
        for part in ("wide_mlp", "experts/shared")
        for x in ("gate", "up", "down")
    },
    "layers/experts/router/kernel": f"{_LAYER}.router.proj.weight",
    "layers/experts/router_scale": f"{_LAYER}.router.scale",
    "layers/experts/expert_scale": f"{_LAYER}.router.per_expert_scale",
    "layers/experts/input_norm/scale": f"{_LAYER}.pre_feedforward_layernorm_2.weight",
    "layers/experts/output_norm/scale": f"{_LAYER}.post_feedforward_layernorm_2.weight",
    "layers/experts/shared_norm/scale": f"{_LAYER}.post_feedforward_layernorm_1.weight",
    **{
        f"layers/experts/{part}/kernel": ExpertsTensor(f"{_LAYER}.experts.{name}", transposed=True)
        for part, name in (("gate", "gate_up_proj"), ("up", "gate_up_proj"), ("down", "down_proj"))
    },
    "layers/layer_input/gate/kernel": f"{_LAYER}.per_layer_input_gate.weight",
    "layers/layer_input/projection/kernel": f"{_LAYER}.per_layer_projection.weight",
    "layers/layer_input/norm/scale": f"{_LAYER}.post_per_layer_input_norm.weight",
    "layers/layer_scale/scale": f"{_LAYER}.layer_scalar",
    "layer_inputs/embedding": "model.embed_tokens_per_layer.weight",
    "layer_inputs/projection/kernel": "model.per_layer_model_projection.weight",
    "layer_inputs/norm/scale": "model.per_layer_projection_norm.weight",
}

GEMMA4 = Family("gemma4_text", "Gemma4ForCausalLM", _read, _write, _NAMES)
