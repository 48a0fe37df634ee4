"""GRPO and its variants: completions of one prompt are rewarded against each other.

Legend: R rows, T tokens of a row.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax

from fornax.models import Decoder, Remat, TokenLogprobs
from fornax.train.routing import with_routing
from fornax.train.task import Batch, Loss, Task
from fornax.tune.config import GRPOConfig
from fornax.tune.policy import Origin
from fornax.tune.rl.components import make_components
from fornax.tune.rl.credit import Credit, divergence, group_credit
from fornax.tune.rl.forward import ROUTED, rows_logprobs
from fornax.tune.rl.loss import PolicyLoss, policy_loss
from fornax.tune.rl.packing import Scored
from fornax.tune.rl.rollouts import Rollout
from fornax.tune.rl.task import Components, Objective, rl_task

__all__ = ["grpo_objective", "grpo_task", "make"]


def make(config: GRPOConfig, origin: Origin, out: Path) -> Task:
    """The task of `fornax tune grpo`."""
    return grpo_task(config, make_components(config, origin, out))


def grpo_task(config: GRPOConfig, components: Components) -> Task:
    """GRPO with any policy, prompts, rewards and sampler."""
    return rl_task(config, components, grpo_objective(config))


def grpo_objective(config: GRPOConfig) -> Objective:
    """What GRPO's steps compute, and its advantages."""
    algorithm = config.algorithm
    in_reward = algorithm.kl_in == "reward"
    options = PolicyLoss(
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
        clip_dual=algorithm.clip_dual,
        ratio=algorithm.ratio,
        kl_coefficient=0.0 if in_reward else algorithm.kl_coefficient,
        kl_estimator=algorithm.kl_estimator,
        entropy_coefficient=config.entropy_coefficient,
        importance=config.importance,
    )
    needs_reference = algorithm.kl_coefficient > 0
    needs_old = config.steps_per_round > 1 or (needs_reference and in_reward)
    passes = {
        name: Logps(name, config.rollout.temperature, config.resolved_remat(), reference)
        for name, reference in (("old_logps", False), ("ref_logps", True))
    }

    def loss(model: Decoder, batch: Batch) -> Loss:
        found = passes["old_logps"].of(model, batch, entropy=True)
        return with_routing(policy_loss(options, batch, found), model, found.routing, balance=False)

    def credit(rollouts: Sequence[Rollout], scored: Scored) -> Credit:
        divergences = None
        if needs_reference and in_reward:
            pairs = zip(scored["old_logps"], scored["ref_logps"], strict=True)
            divergences = [divergence(old, ref, algorithm.kl_estimator) for old, ref in pairs]
        return group_credit(
            rollouts,
            algorithm,
            group_size=config.group_size,
            max_tokens=config.rollout.max_tokens,
            divergences=divergences,
        )

    return Objective(
        loss=loss,
        score=passes["old_logps"] if needs_old else None,
        reference=passes["ref_logps"] if needs_reference else None,
        credit=credit,
        aggregation=algorithm.aggregation,
        mask_truncated=algorithm.mask_truncated,
        skip_zero_advantage=algorithm.skip_zero_advantage,
        max_resamples=algorithm.max_resamples if algorithm.dynamic_sampling else 0,
    )


@dataclass(frozen=True)
class Logps:
    """Log-probabilities of the rows' targets at the temperature they were drawn at."""

    name: str
    """Of the array, among the rows."""
    temperature: float
    remat: Remat
    reference: bool = False
    """Whether it is the reference that is asked, whose routers choose."""

    def __call__(self, model: Decoder, rows: Batch) -> Mapping[str, jax.Array]:
        """The array [R, T]."""
        return {self.name: self.of(model, rows).logprobs}

    def of(self, model: Decoder, rows: Batch, *, entropy: bool = False) -> TokenLogprobs:
        """Values [R, T], with the entropy if asked for."""
        options = {"temperature": self.temperature, "remat": self.remat}
        if self.reference:
            rows = {name: x for name, x in rows.items() if name != ROUTED}
        return rows_logprobs(model, rows, entropy=entropy, **options)
