"""Losses of post-training: pure functions of arrays, each with its equation, paper and oracle."""

from fornax.tune.losses.chunked import (
    DistillSums,
    linear_distillation,
    linear_topk_distillation,
)
from fornax.tune.losses.distill import (
    Divergence,
    Tail,
    forward_kl,
    jensen_shannon,
    reverse_kl,
    topk_forward_kl,
    topk_jensen_shannon,
    topk_reverse_kl,
)
from fornax.tune.losses.policy import (
    kl_penalty,
    policy_gradient,
    truncated_importance,
    value_loss,
)
from fornax.tune.losses.preference import (
    average,
    bradley_terry,
    cpo,
    dpo,
    ipo,
    kto,
    kto_kl,
    orpo,
    robust_dpo,
    simpo,
)

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
