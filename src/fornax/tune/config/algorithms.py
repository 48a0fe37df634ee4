"""The published variants of GRPO, as presets of one set of options.

No code asks which variant it is: each is a dataclass whose defaults are its paper's, every option
can be set in any of them, and the task reads the options alone.
"""

from dataclasses import dataclass
from typing import Literal

from fornax.config.errors import ConfigError

__all__ = [
    "DAPO",
    "GRPO",
    "GSPO",
    "RLOO",
    "Aggregation",
    "Algorithm",
    "DrGRPO",
    "Estimator",
    "GroupAlgorithm",
    "ReinforcePlusPlus",
    "check_clip",
]


Estimator = Literal["k1", "k2", "k3"]
Aggregation = Literal["sequence_mean", "token_mean", "constant"]


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """What a completion is compared with, how far a step may go, and how tokens are weighed."""

    baseline: Literal["group", "leave_one_out", "none"] = "group"
    """What is subtracted from a reward: the mean of its group, the mean of the others in it, or
    nothing."""
    scale: Literal["group", "batch", "none"] = "group"
    """The standard deviation that advantages are divided by: over the group, over all completions
    of the rollout, or none."""
    ratio: Literal["token", "sequence"] = "token"
    """Whether each token has its importance ratio, or a completion one: the geometric mean."""
    clip_low: float | None = 0.2
    """The ratio counts down to 1 - this; null does not clip."""
    clip_high: float | None = 0.2
    """The ratio counts up to 1 + this; null does not clip."""
    clip_dual: float | None = None
    """With a negative advantage the ratio counts up to this (dual clip, above 1); null: without
    limit."""
    aggregation: Aggregation = "sequence_mean"
    """How token losses become one number: the mean of the means of completions, the mean over all
    tokens, or the sum over a constant (`rollout.max_tokens`) for each completion."""
    kl_coefficient: float = 0.0
    """Weight of the divergence from the reference policy; 0 keeps no reference."""
    kl_estimator: Estimator = "k3"
    """Estimator of the divergence from one sample (Schulman 2020). In the loss k2 and k3 are
    differentiated as they stand; k1, whose own gradient is 0 in the mean, takes that of
    KL(policy | reference) (Tang and Munos 2025)."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Whether the divergence is a term of the loss, or is taken off the reward: off a completion's
    as a sum over its tokens, or, with baseline=none, off each token's own."""
    dynamic_sampling: bool = False
    """Replace groups whose rewards are all alike (advantages of 0) by those of more prompts."""
    max_resamples: int = 4
    """With dynamic sampling, how many times more prompts may be asked before a step is made from
    the groups found."""
    overlong_tokens: int | None = 0
    """Last tokens of `rollout.max_tokens` in which a completion's reward falls linearly, to
    `overlong_penalty` less at its end; 0: none; null: a fifth of `rollout.max_tokens`."""
    overlong_penalty: float = 1.0
    """The largest loss of reward by length."""
    mask_truncated: bool = False
    """Leave completions that ran out of tokens out of the loss."""
    skip_zero_advantage: bool = False
    """Leave completions whose advantage is 0 out of the training pass: the gradient is the same
    and costs less. Entropy and the other figures of a step are then means over the others."""

    def __post_init__(self) -> None:
        check_clip(self.clip_low, self.clip_high, self.clip_dual)
        for name in ("kl_coefficient", "overlong_penalty", "max_resamples"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)} must be 0 or more")
        if self.overlong_tokens is not None and self.overlong_tokens < 0:
            raise ConfigError(f"overlong_tokens={self.overlong_tokens} must be 0 or more, or null")
        if self.baseline == "none" and self.scale == "group":
            raise ConfigError(
                "baseline=none with scale=group divides rewards by a group's spread without "
                "centring them; use scale=batch or none, or baseline=group"
            )
        if self.baseline == "leave_one_out" and self.scale != "none":
            raise ConfigError(
                f"baseline=leave_one_out with scale={self.scale}: it is baseline=group but for a "
                "constant factor; use that, or scale=none"
            )
        if self.dynamic_sampling and self.max_resamples < 1:
            raise ConfigError(
                "dynamic_sampling needs max_resamples of 1 or more: it samples more prompts"
            )

    def overlong_buffer(self, max_tokens: int) -> int:
        """The tokens in which the reward falls, `overlong_tokens` resolved."""
        return max_tokens // 5 if self.overlong_tokens is None else self.overlong_tokens


def check_clip(low: float | None, high: float | None, dual: float | None) -> None:
    """Refuse clipping ranges that no ratio can lie in.

    Raises:
      ConfigError: naming the option.
    """
    if low is not None and not 0 <= low <= 1:
        raise ConfigError(f"clip_low={low} must lie in [0, 1], or null: a ratio is never negative")
    if high is not None and high < 0:
        raise ConfigError(f"clip_high={high} must be 0 or more, or null")
    if dual is not None and dual <= 1:
        raise ConfigError(f"clip_dual={dual} must be above 1, or null")


@dataclass(frozen=True, kw_only=True)
class GRPO(Algorithm):
    """Group-relative policy optimization as published (Shao et al. 2024)."""

    type: Literal["grpo"] = "grpo"
    kl_coefficient: float = 0.04


@dataclass(frozen=True, kw_only=True)
class DAPO(Algorithm):
    """Clip higher, dynamic sampling, token mean, soft overlong penalty, no KL (Yu et al. 2025)."""

    type: Literal["dapo"] = "dapo"
    clip_high: float | None = 0.28
    aggregation: Aggregation = "token_mean"
    dynamic_sampling: bool = True
    overlong_tokens: int | None = None


@dataclass(frozen=True, kw_only=True)
class DrGRPO(Algorithm):
    """GRPO without its two biases, of length and of difficulty (Liu et al. 2025)."""

    type: Literal["dr_grpo"] = "dr_grpo"
    scale: Literal["group", "batch", "none"] = "none"
    aggregation: Aggregation = "constant"


@dataclass(frozen=True, kw_only=True)
class GSPO(Algorithm):
    """One importance ratio for each completion (Zheng et al. 2025)."""

    type: Literal["gspo"] = "gspo"
    ratio: Literal["token", "sequence"] = "sequence"
    clip_low: float | None = 3e-4
    clip_high: float | None = 4e-4


@dataclass(frozen=True, kw_only=True)
class RLOO(Algorithm):
    """REINFORCE with the other completions of the group as baseline (Ahmadian et al. 2024)."""

    type: Literal["rloo"] = "rloo"
    baseline: Literal["group", "leave_one_out", "none"] = "leave_one_out"
    scale: Literal["group", "batch", "none"] = "none"
    aggregation: Aggregation = "constant"
    kl_coefficient: float = 0.05
    kl_estimator: Estimator = "k1"
    kl_in: Literal["loss", "reward"] = "reward"


@dataclass(frozen=True, kw_only=True)
class ReinforcePlusPlus(Algorithm):
    """REINFORCE with a token's KL in its reward and advantages whitened over the batch (Hu 2025).

    It needs no group: `group_size` may be 1.
    """

    type: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    baseline: Literal["group", "leave_one_out", "none"] = "none"
    scale: Literal["group", "batch", "none"] = "batch"
    aggregation: Aggregation = "token_mean"
    kl_coefficient: float = 0.01
    kl_estimator: Estimator = "k1"
    kl_in: Literal["loss", "reward"] = "reward"


GroupAlgorithm = GRPO | DAPO | DrGRPO | GSPO | RLOO | ReinforcePlusPlus
"""The choices of `algorithm.type`."""
