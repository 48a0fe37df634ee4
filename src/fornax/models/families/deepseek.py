"""DeepSeek V2 and V3, latent attention and experts; Kimi K2 and Moonlight are saved as V3."""

from collections.abc import Mapping
from typing import Any

from fornax.config.errors import ConfigError
from fornax.models.config import DecoderConfig
from fornax.models.families.common import read_common, write_common
from fornax.models.families.family import BASE_NAMES, PRE_NORM_NAMES, Family
from fornax.models.families.reader import ConfigReader
from fornax.models.families.rope_keys import read_rope, write_rope
from fornax.models.families.routed import (
    ROUTED_MTP,
    ROUTED_NAMES,
    mlp_pattern,
    read_routed,
    read_sigmoid_router,
    with_modules,
    write_grouped_router,
    write_routed,
)
from fornax.models.latent_config import LatentConfig
from fornax.models.rope_config import RopeConfig

__all__ = ["DEEPSEEK_V2", "DEEPSEEK_V3", "LATENT_NAMES", "read_latent", "write_latent"]


_SIZES = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1_536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}


def read_latent(
    reader: ConfigReader, sizes: Mapping[str, int], head: str, eps: float = 1e-6
) -> dict[str, Any]:
    """The fields of a model with latent attention, the rope and the experts aside.

    Args:
      reader: the file.
      sizes: the family's defaults.
      head: the key whose value `head_dim` repeats.
      eps: the family's default for `rms_norm_eps`.

    Raises:
      ConfigError: when it does not.
    """
    fields = read_common(reader, tied=False, eps=eps)
    bias = reader.take("attention_bias", False)
    found = {key: reader.take(key, size) for key, size in sizes.items()}
    width = found["qk_nope_head_dim"] + found["qk_rope_head_dim"]
    reader.expect("qk_head_dim", width)
    expected = {**found, "qk_head_dim": width}[head]
    if fields.pop("head_dim") not in (None, expected):
        raise ConfigError(
            f"{reader.source}: head_dim is not {head}={expected}, which it stands for in this "
            "architecture; leave it out"
        )
    latent = LatentConfig(
        key_value_rank=found["kv_lora_rank"],
        query_rank=found["q_lora_rank"],
        unrotated_dim=found["qk_nope_head_dim"],
        rotated_dim=found["qk_rope_head_dim"],
        value_dim=found["v_head_dim"],
        bias=bias,
    )
    return {**fields, "latent": latent, "attention_output_bias": bias}


def _read_shared(reader: ConfigReader) -> dict[str, Any]:
    """The fields that both have, the rope and the experts aside."""
    return read_latent(reader, _SIZES, "qk_rope_head_dim")


def write_latent(config: DecoderConfig) -> dict[str, Any]:
    """The inverse of `read_latent`, with the experts."""
    latent = config.latent
    if latent is None:
        raise ConfigError("latent=None")
    return {
        **write_common(config),
        **write_routed(config),
        "attention_bias": latent.bias,
        "kv_lora_rank": latent.key_value_rank,
        "q_lora_rank": latent.query_rank,
        "qk_nope_head_dim": latent.unrotated_dim,
        "qk_rope_head_dim": latent.rotated_dim,
        "v_head_dim": latent.value_dim,
    }


def _write_shared(config: DecoderConfig) -> dict[str, Any]:
    keys = {**write_latent(config), **write_rope(config.rope)}
    return {**keys, "head_dim": keys["qk_rope_head_dim"]}


def _rope(reader: ConfigReader, fields: dict[str, Any], *, interleaved: bool) -> RopeConfig:
    return read_rope(reader, fields["max_position_embeddings"], interleaved=interleaved)


def _read_v2(reader: ConfigReader) -> DecoderConfig:
    fields = _read_shared(reader)
    reader.expect("norm_topk_prob", False, None)
    reader.expect("scoring_func", "softmax")
    method = reader.take("topk_method", "greedy")
    groups, open_groups = reader.take("n_group", None), reader.take("topk_group", None)
    if method not in ("greedy", "group_limited_greedy"):
        raise ConfigError(
            f"{reader.source}: topk_method={method!r} is not supported; use greedy or "
            "group_limited_greedy"
        )
    if method == "greedy":
        groups = open_groups = 1
    return DecoderConfig(
        **fields,
        rope=_rope(reader, fields, interleaved=True),
        mlp_bias=reader.take("mlp_bias", False),
        mlp_pattern=mlp_pattern(reader, fields["num_layers"], 0),
        experts=read_routed(
            reader,
            shared=2,
            normalize=False,
            num_groups=groups,
            groups_per_token=open_groups,
        ),
    )


def _write_v2(config: DecoderConfig) -> dict[str, Any]:
    experts = config.experts
    grouped = experts is not None and experts.num_groups > 1
    return {
        **_write_shared(config),
        "mlp_bias": config.mlp_bias,
        "norm_topk_prob": False,
        "scoring_func": "softmax",
        "topk_method": "group_limited_greedy" if grouped else "greedy",
    }


def _read_v3(reader: ConfigReader) -> DecoderConfig:
    fields = _read_shared(reader)
    interleaved = reader.take("rope_interleave", True)
    return DecoderConfig(
        **fields,
        rope=_rope(reader, fields, interleaved=interleaved),
        mlp_pattern=mlp_pattern(reader, fields["num_layers"], 3),
        experts=read_sigmoid_router(reader, groups=8, open_groups=4, scale=2.5),
    )


def _write_v3(config: DecoderConfig) -> dict[str, Any]:
    return {
        **_write_shared(config),
        **write_grouped_router(config),
        "rope_interleave": config.rope.interleaved,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }


_PARTS = {
    "q": "q_proj",
    "q_down": "q_a_proj",
    "q_up": "q_b_proj",
    "kv_down": "kv_a_proj_with_mqa",
    "kv_up": "kv_b_proj",
    "o": "o_proj",
}
LATENT_NAMES = {
    **BASE_NAMES,
    **PRE_NORM_NAMES,
    **ROUTED_NAMES,
    **{
        f"layers/latent/{ours}/{kind}": f"model.layers.{{layer}}.self_attn.{theirs}.{suffix}"
        for ours, theirs in _PARTS.items()
        for kind, suffix in (("kernel", "weight"), ("bias", "bias"))
    },
    "layers/latent/q_norm/scale": "model.layers.{layer}.self_attn.q_a_layernorm.weight",
    "layers/latent/kv_norm/scale": "model.layers.{layer}.self_attn.kv_a_layernorm.weight",
}

DEEPSEEK_V2 = Family("deepseek_v2", "DeepseekV2ForCausalLM", _read_v2, _write_v2, LATENT_NAMES)
DEEPSEEK_V3 = Family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    _read_v3,
    _write_v3,
    with_modules(LATENT_NAMES),
    ROUTED_MTP,
)
