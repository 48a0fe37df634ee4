"""GRPO and its variants: completions of one prompt are rewarded against each other.

Legend: R rows, T tokens of a row.
"""

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from fornax.models import TokenLogprobs, token_logprobs
from fornax.train.task import Batch, Loss, Task
from fornax.tune.policy import Origin
from fornax.tune.rl.config import GRPOConfig
from fornax.tune.rl.credit import Credit, divergence, group_credit
from fornax.tune.rl.loss import PolicyLoss, policy_loss
from fornax.tune.rl.parts import make_parts
from fornax.tune.rl.rollouts import Rollout
from fornax.tune.rl.rounds import Scored
from fornax.tune.rl.task import Method, Parts, rl_task

__all__ = ["grpo_task", "make"]


def make(config: GRPOConfig, origin: Origin, out: Path) -> Task:
    """The task of `fornax tune grpo`."""
    return grpo_task(config, make_parts(config, origin, out))


def grpo_task(config: GRPOConfig, parts: Parts) -> Task:
    """GRPO with any policy, prompts, rewards and sampler."""
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
    logps = functools.partial(_logps, config)

    def loss(model: Any, batch: Batch) -> Loss:
        return policy_loss(options, batch, logps(model, batch, entropy=True))

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

    def score(name: str, model: Any, rows: Batch) -> Mapping[str, jax.Array]:
        return {name: logps(model, rows).logprobs}

    return rl_task(
        config,
        parts,
        Method(
            loss=loss,
            score=functools.partial(score, "old_logps") if needs_old else None,
            reference=functools.partial(score, "ref_logps") if needs_reference else None,
            credit=credit,
            aggregation=algorithm.aggregation,
            mask_truncated=algorithm.mask_truncated,
            max_resamples=algorithm.max_resamples if algorithm.dynamic_sampling else 0,
        ),
    )


def _logps(config: GRPOConfig, model: Any, rows: Batch, *, entropy: bool = False) -> TokenLogprobs:
    return token_logprobs(
        model,
        rows["tokens"],
        rows["targets"],
        positions_BT=rows["positions"],
        segment_ids_BT=rows["segment_ids"],
        temperature=config.rollout.temperature,
        entropy=entropy,
        remat=config.resolved_remat(),
    )
