"""A mixture of experts as a config: its router's rule and its experts' sizes."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType
from typing import Any, Literal

from fornax.config.errors import ConfigError

__all__ = ["TRAINING_ONLY", "ExpertsConfig"]


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """A mixture of experts in an MLP's place (Shazeer et al. 2017, section 2).

    The router scores all experts for a token in float32, the best `experts_per_token` run, and the
    sum of their outputs, each times its weight, is the result.
    """

    num_experts: int
    """Number of experts that are routed to."""
    experts_per_token: int
    """How many of them each token runs through."""
    intermediate_size: int
    """Width inside each expert."""

    score: Literal["softmax", "sigmoid"] = "softmax"
    """What makes scores of the router's logits: over all experts, or of each by itself."""
    normalize: bool = True
    """Whether a token's weights are its chosen scores divided by their sum."""
    normalize_eps: float = 0.0
    """Added to that sum."""
    scale: float = 1.0
    """Factor on the weights."""
    weigh: Literal["output", "input"] = "output"
    """What a weight multiplies: the expert's output, or its input."""
    router_bias: bool = False
    """Whether the router's logits have a bias."""
    selection_bias: bool = False
    """Whether a bias is added to the scores where experts are chosen, and only there (Wang et al.
    2024, auxiliary-loss-free load balancing). It has no gradient."""
    num_groups: int = 1
    """Groups of experts, of which `groups_per_token` are open to a token (DeepSeek-V2, 2.2.2)."""
    groups_per_token: int = 1
    """How many groups a token may choose from."""
    group_score: Literal["max", "top2"] = "max"
    """A group's score: its best expert's, or the sum of its two best."""

    bias: bool = False
    """Whether the experts' projections have biases."""
    clip: float | None = None
    """c of the clipped activation (up + 1) gate sigmoid(a gate), with gate at most c and up within
    -c and c (gpt-oss); None for the model's own activation."""
    clip_gain: float = 1.702
    """a of the clipped activation."""
    shared_intermediate_size: int | None = None
    """Width of an MLP beside the experts that every token runs through; None for none."""
    separate_norms: bool = False
    """Whether router, experts and shared MLP stand side by side in the residual stream (Gemma 4):
    the router reads the stream through an RMSNorm without a weight, times a learned vector and
    hidden_size^-1/2, and its weights are multiplied by a learned number for each expert; the
    experts read the stream through a norm of their own; and each result has a norm before the sum.
    The shared MLP reads what the layer's norm gives."""
    shared_gate: bool = False
    """Whether its output is multiplied by the sigmoid of a projection of the token."""

    balance_loss: float = 0.0
    """Weight of the load-balancing loss (Fedus et al. 2021, equations 4 to 6)."""
    router_z_loss: float = 0.0
    """Weight of the mean squared log-sum-exp of the router's logits (Zoph et al. 2022, eq. 5)."""
    bias_update_rate: float = 0.001
    """How far a step moves `selection_bias` towards experts below the mean load."""

    exchange: Literal["auto", "all_to_all", "all_gather"] = "auto"
    """How tokens reach experts of other devices (mesh axis `expert`): each token is sent to those
    that have its experts, or all are gathered, and the experts' outputs reduced and scattered. It
    changes no result. auto takes what sends fewer bytes: all_to_all where `experts_per_token` is
    below the number of devices that the experts are divided over."""

    capacity_factor: float | None = None
    """f of C = ceil(f k T / E), the tokens of a row of T that an expert has room for in pretraining
    (Fedus et al. 2021, section 2.2, with a row of the batch as the group): an expert's first C
    tokens of a row by position run, and the weight of the others for it is zero. None: no token is
    dropped, as in evaluation, tuning, generation and serving, which have room for all whatever this
    is."""

    def capacity(self, tokens: int) -> int | None:
        """C, of a row of this many tokens; None where nothing is dropped."""
        if self.capacity_factor is None:
            return None
        # As it is written: of 1.1 a row of 10 tokens is 11, where the nearest binary number is more
        even = Fraction(self.experts_per_token * tokens, self.num_experts)
        return min(tokens, math.ceil(Fraction(str(self.capacity_factor)) * even))

    def __post_init__(self) -> None:
        """Check sizes and combinations."""
        sizes = ("num_experts", "experts_per_token", "intermediate_size", "num_groups")
        may_be_none = ("clip", "shared_intermediate_size", "capacity_factor")
        for name in (*sizes, "groups_per_token", *may_be_none):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"experts.{name}={value} must be above 0")
        if self.capacity_factor is not None and not math.isfinite(self.capacity_factor):
            raise ConfigError(
                f"experts.capacity_factor={self.capacity_factor} must be finite; use null, so that "
                "no token is dropped"
            )
        if self.num_experts % self.num_groups or self.groups_per_token > self.num_groups:
            raise ConfigError(
                f"experts.num_groups={self.num_groups} must divide num_experts={self.num_experts}, "
                f"and groups_per_token={self.groups_per_token} be at most num_groups"
            )
        open_experts = self.num_experts // self.num_groups * self.groups_per_token
        if self.experts_per_token > open_experts:
            raise ConfigError(
                f"experts.experts_per_token={self.experts_per_token} is more than the "
                f"{open_experts} experts that a token can choose from"
            )
        if self.group_score == "top2" and self.num_experts // self.num_groups < 2:
            raise ConfigError("experts.group_score='top2' needs two experts in each group")
        if self.shared_gate and self.shared_intermediate_size is None:
            raise ConfigError("experts.shared_gate needs shared_intermediate_size")
        if self.separate_norms and self.shared_intermediate_size is None:
            raise ConfigError("experts.separate_norms needs shared_intermediate_size")
        for name in ("normalize_eps", "balance_loss", "router_z_loss", "bias_update_rate"):
            if getattr(self, name) < 0:
                raise ConfigError(f"experts.{name}={getattr(self, name)} must be at least 0")


TRAINING_ONLY: Mapping[str, Any] = MappingProxyType(
    {
        name: ExpertsConfig.__dataclass_fields__[name].default
        for name in (
            "balance_loss",
            "router_z_loss",
            "bias_update_rate",
            "exchange",
            "capacity_factor",
        )
    }
)
"""Fields that say how a model is trained and not what it computes, with their defaults."""
