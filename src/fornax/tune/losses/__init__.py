"""Losses of post-training: pure functions of arrays, each with its equation, paper and oracle."""

from fornax.tune.losses.chunked import (
    DistillSums,
    linear_distillation,
    linear_topk_distillation,
)
from fornax.tune.losses.distill import Divergence, forward_kl, jensen_shannon, reverse_kl
from fornax.tune.losses.policy import (
    kl_penalty,
    policy_gradient,
    truncated_importance,
    value_loss,
)
from fornax.tune.losses.preference import average, cpo, dpo, ipo, orpo, robust_dpo, simpo
from fornax.tune.losses.reward_model import bradley_terry
from fornax.tune.losses.topk import (
    Tail,
    topk_forward_kl,
    topk_jensen_shannon,
    topk_reverse_kl,
)
from fornax.tune.losses.unpaired import kto, kto_kl

__all__ = [
    "DistillSums",
    "Divergence",
    "Tail",
    "average",
    "bradley_terry",
    "cpo",
    "dpo",
    "forward_kl",
    "ipo",
    "jensen_shannon",
    "kl_penalty",
    "kto",
    "kto_kl",
    "linear_distillation",
    "linear_topk_distillation",
    "orpo",
    "policy_gradient",
    "reverse_kl",
    "robust_dpo",
    "simpo",
    "topk_forward_kl",
    "topk_jensen_shannon",
    "topk_reverse_kl",
    "truncated_importance",
    "value_loss",
]
