"""The policy's loss over packed rows: clipped ratios, divergence, entropy, and their figures.

Legend: R rows, T tokens of a row.
"""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp

from fornax.models import TokenLogprobs
from fornax.train.task import Batch, Loss
from fornax.tune import losses
from fornax.tune.config import Estimator, Importance

__all__ = ["PolicyLoss", "policy_loss"]


@dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    """The options of `policy_loss`, the same in every step of a run."""

    clip_low: float | None
    clip_high: float | None
    clip_dual: float | None = None
    ratio: Literal["token", "sequence"] = "token"
    kl_coefficient: float = 0.0
    kl_estimator: Estimator = "k3"
    entropy_coefficient: float = 0.0
    importance: Importance | None = None


def policy_loss(options: PolicyLoss, batch: Batch, policy_RT: TokenLogprobs) -> Loss:
    """Sums over the tokens that the model drew, weighted by the rows' `token_weights`.

    The log-probabilities before the step are the row's `old_logps`; rows without them are trained
    on once, and those of this very pass stand in for them: the ratio is then 1 and its gradient
    that of the log-probability.

    Args:
      options: what is added up.
      batch: loss_mask, token_weights, advantages, sampler_logps and perhaps old_logps and
        ref_logps, float32 [R, T]; sequence_weights float32 [R]; segment_ids int32 [R, T].
      policy_RT: float32, of the targets, at the temperature they were drawn at, with entropy.
    """
    logps_RT, entropy_RT = policy_RT.logprobs, policy_RT.entropy
    assert entropy_RT is not None, "ask for the entropy too"
    mask_RT = batch["loss_mask"]
    old_RT = batch.get("old_logps", jax.lax.stop_gradient(logps_RT))
    importance = options.importance or Importance()
    weights_RT, mismatch = losses.truncated_importance(
        old_RT,
        batch["sampler_logps"],
        mask_RT,
        cap=importance.cap,
        level=importance.level,
        segment_ids_BT=batch["segment_ids"],
    )
    loss_RT, figures = losses.policy_gradient(
        logps_RT,
        old_RT,
        batch["advantages"],
        mask_RT,
        clip_low=options.clip_low,
        clip_high=options.clip_high,
        clip_c=options.clip_dual,
        ratio=options.ratio,
        segment_ids_BT=batch["segment_ids"],
        is_weights_BT=None if options.importance is None else weights_RT,
    )
    tokens = jnp.sum(mask_RT)

    def mean(x_RT: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.sum(jax.lax.stop_gradient(x_RT) * mask_RT), tokens

    metrics = {
        "entropy": mean(entropy_RT),
        "ratio_mean": mean(figures["ratio"]),
        "clip_fraction": mean(figures["clipped"]),
        "approx_kl": mean(figures["approx_kl"]),
        "mismatch_kl": mean(mismatch["mismatch_kl"]),
    }
    if options.importance is not None:
        metrics["importance"] = mean(weights_RT)
        metrics["importance_truncated"] = mean(mismatch["truncated"])
    if "ref_logps" in batch:
        estimator = options.kl_estimator
        # On slots that are not trained the two may lie far apart, where exp() would overflow.
        ref_RT = jnp.where(mask_RT > 0, batch["ref_logps"], logps_RT)
        # k2 and k3 are differentiated as published; k1's own gradient is 0 in the mean.
        gradient = "unbiased" if estimator == "k1" else "estimator"
        kl_RT = losses.kl_penalty(logps_RT, ref_RT, estimator=estimator, gradient=gradient)
        metrics["kl"] = mean(kl_RT)
        loss_RT += options.kl_coefficient * kl_RT
    if options.entropy_coefficient:
        loss_RT -= options.entropy_coefficient * entropy_RT
    largest = jnp.max(jnp.where(mask_RT > 0, figures["ratio"], 0.0))
    return Loss(
        total=jnp.sum(jnp.where(mask_RT > 0, loss_RT, 0.0) * batch["token_weights"]),
        weight=jnp.sum(batch["sequence_weights"]),
        metrics=metrics,
        maxima={"ratio_max": jax.lax.stop_gradient(largest)},
    )
