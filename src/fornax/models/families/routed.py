"""The keys of experts in DeepSeek's form: leading dense layers, shared experts, groups, a bias."""

from collections.abc import Mapping
from typing import Any

from fornax.config.errors import ConfigError
from fornax.models.config import DecoderConfig
from fornax.models.experts_config import ExpertsConfig
from fornax.models.families.common import shortest_pattern
from fornax.models.families.family import MTPFiles, TensorName, expert_names, module_names
from fornax.models.families.reader import ConfigReader

__all__ = [
    "ROUTED_MTP",
    "ROUTED_NAMES",
    "mlp_pattern",
    "read_grouped_router",
    "read_routed",
    "read_sigmoid_router",
    "with_modules",
    "write_grouped_router",
    "write_routed",
]


def mlp_pattern(reader: ConfigReader, layers: int, default: int) -> tuple[Any, ...]:
    """`DecoderConfig.mlp_pattern`: some dense layers first, then experts."""
    reader.expect("moe_layer_freq", 1)
    dense = min(reader.take("first_k_dense_replace", default), layers)
    return shortest_pattern(["mlp"] * dense + ["experts"] * (layers - dense))


def read_routed(reader: ConfigReader, *, shared: int, scale: float = 1.0, **rule: Any) -> Any:
    """The experts' sizes, with the router's rule.

    Args:
      reader: the file.
      shared: the family's default number of experts that every token runs through.
      scale: the family's default factor on the weights.
      rule: further fields of `ExpertsConfig`.
    """
    for key in ("ep_size", "output_router_logits", "seq_aux"):  # how it is trained
        reader.take(key, None)
    reader.take("num_nextn_predict_layers", 0)  # see `Family.mtp`
    width = reader.take("moe_intermediate_size")
    return ExpertsConfig(
        num_experts=reader.take("n_routed_experts"),
        experts_per_token=reader.take("num_experts_per_tok"),
        intermediate_size=width,
        shared_intermediate_size=width * reader.take("n_shared_experts", shared) or None,
        scale=reader.take("routed_scaling_factor", scale),
        balance_loss=reader.take("aux_loss_alpha", 0.0),
        **rule,
    )


def write_routed(config: DecoderConfig) -> dict[str, Any]:
    """The inverse of `read_routed` and `mlp_pattern`."""
    experts = config.experts
    if experts is None:
        raise ConfigError("experts=None")
    width, shared = experts.intermediate_size, experts.shared_intermediate_size or 0
    if shared % width:
        raise ConfigError(
            f"experts.shared_intermediate_size={shared}, which is not a "
            f"multiple of experts.intermediate_size={width}"
        )
    return {
        "first_k_dense_replace": [kind.mlp for kind in config.layer_kinds()].index("experts"),
        "moe_intermediate_size": width,
        "n_routed_experts": experts.num_experts,
        "n_shared_experts": shared // width,
        "num_experts_per_tok": experts.experts_per_token,
        "routed_scaling_factor": experts.scale,
        "n_group": experts.num_groups,
        "topk_group": experts.groups_per_token,
        "num_nextn_predict_layers": 0,
        "aux_loss_alpha": experts.balance_loss,
    }


def read_sigmoid_router(
    reader: ConfigReader, *, groups: int, open_groups: int, scale: float
) -> ExpertsConfig:
    """Experts whose scores are sigmoids, chosen with a bias (DeepSeek V3).

    Args:
      reader: the file.
      groups: the family's default number of groups.
      open_groups: of which a token may choose from this many.
      scale: the family's default factor on the weights.
    """
    reader.expect("scoring_func", "sigmoid")
    reader.expect("topk_method", "noaux_tc")
    return read_grouped_router(
        reader,
        groups=groups,
        open_groups=open_groups,
        scale=scale,
        score="sigmoid",
        selection_bias=True,
    )


def read_grouped_router(
    reader: ConfigReader, *, groups: int, open_groups: int, scale: float = 1.0, **rule: Any
) -> ExpertsConfig:
    """Experts in groups whose score is the sum of their two best; `rule` is the rest of the rule.

    Args are those of `read_sigmoid_router`.
    """
    return read_routed(
        reader,
        shared=1,
        scale=scale,
        normalize=reader.take("norm_topk_prob", True),
        normalize_eps=1e-20,
        num_groups=reader.take("n_group", groups),
        groups_per_token=reader.take("topk_group", open_groups),
        group_score="top2",
        **rule,
    )


def write_grouped_router(config: DecoderConfig) -> dict[str, Any]:
    """What `read_grouped_router` takes beyond `read_routed`."""
    return {"norm_topk_prob": config.experts is not None and config.experts.normalize}


ROUTED_NAMES = {
    **expert_names(
        "mlp", gate="gate_proj", up="up_proj", down="down_proj", shared="shared_experts"
    ),
    "layers/experts/selection_bias": "model.layers.{layer}.mlp.gate.e_score_correction_bias",
}

_MODULE = "model.layers.{layer}"
ROUTED_MTP = MTPFiles(
    start=f"{_MODULE}.",
    key="num_nextn_predict_layers",
    copies={
        "embed/embedding": f"{_MODULE}.embed_tokens.weight",
        "lm_head/kernel": f"{_MODULE}.shared_head.head.weight",
    },
)
"""Modules as layers after the last (DeepSeek V3)."""


def with_modules(names: Mapping[str, TensorName]) -> dict[str, TensorName]:
    """A family's names, with those of its modules."""
    parts = {
        "embed_norm/scale": f"{_MODULE}.enorm.weight",
        "hidden_norm/scale": f"{_MODULE}.hnorm.weight",
        "projection/kernel": f"{_MODULE}.eh_proj.weight",
        "norm/scale": f"{_MODULE}.shared_head.norm.weight",
    }
    return {**names, **module_names(names, parts)}
