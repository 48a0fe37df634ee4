"""The policy-gradient loss and its companions: PPO, GRPO, DAPO, Dr. GRPO, GSPO, RLOO, REINFORCE++.

These differ in the advantages (`tune.advantages`), in the clipping and the level of the ratio
(here), and in how tokens are weighted (`advantages.aggregation_weights`).

Legend: B rows, T tokens of a row.
"""

from typing import Literal

import jax
import jax.numpy as jnp

from fornax.config.errors import ConfigError
from fornax.tune.losses._arrays import Metrics, per_sequence_sum, reported, wide

__all__ = ["kl_penalty", "policy_gradient", "truncated_importance", "value_loss"]

Ratio = Literal["token", "sequence", "product"]
"""Of each token, of its sequence as a mean in the logarithm (GSPO), or as a product."""

_FAR = 60.0
"""Log-ratios are kept within this, so that their exp times an advantage of 0 is still 0."""


@jax.named_scope("loss")
def policy_gradient(
    logps_BT: jax.Array,
    old_logps_BT: jax.Array,
    advantages_BT: jax.Array,
    mask_BT: jax.Array,
    *,
    clip_low: float | None = 0.2,
    clip_high: float | None = 0.2,
    clip_c: float | None = None,
    ratio: Ratio = "token",
    segment_ids_BT: jax.Array | None = None,
    is_weights_BT: jax.Array | None = None,
) -> tuple[jax.Array, Metrics]:
    """The clipped surrogate of each token (Schulman et al. 2017, equation 7), and its variants.

    loss = -w min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = exp(logp - old logp).

    - `clip_high` above `clip_low` is DAPO's clip-higher (Yu et al. 2025).
    - `clip_c` c is the dual clip (Ye et al. 2020): where A < 0, loss <= -w c A, so a
      token that became far likelier cannot dominate.
    - ratio="sequence" is GSPO (Zheng et al. 2025): every token has its sequence's
      r = exp(mean of (logp - old logp)). Ranges are then far narrower, 3e-4 and 4e-4 in the paper.
    - ratio="product": every token has r = exp(sum of (logp - old logp)), the completion being one
      action (RLOO; Ahmadian et al. 2024). Weight its tokens so that each sequence's sum to 1.
    - Both clips None: no clipping. Where old logps equal the new ones the gradient is that of
      REINFORCE, -A grad logp, for all of these.

    Args:
        logps_BT: log-probabilities under the model that is trained, at the temperature of sampling.
        old_logps_BT: under the weights at the start of the step; no gradient. On-policy:
            `stop_gradient(logps_BT)`.
        advantages_BT: A, [B, T] or anything that broadcasts to it, such as [B, 1]; no gradient.
        mask_BT: not 0 for the tokens that the model itself wrote.
        clip_low: how far below 1 the ratio may fall, 0 to 1; None for no bound.
        clip_high: how far above 1 it may rise; None for no bound.
        clip_c: c, above 1; None for no dual clip.
        ratio: level of the importance ratio.
        segment_ids_BT: the sequences inside packed rows, 0 for padding; None: a row is a sequence.
        is_weights_BT: w, from `truncated_importance`; None for 1.

    Returns:
        loss [B, T], 0 where the mask is: weight it with `aggregation_weights` and sum; metrics
        [B, T]: ratio, clipped (1 where clipping removes the gradient), approx_kl (k3 of the old
        policy from the new). They mean nothing outside the mask.

    Raises:
        ConfigError: ranges that make no sense.

    Example:
        >>> one = jnp.ones((1, 1))
        >>> loss, metrics = policy_gradient(jnp.log(3 * one), 0 * one, one, one)
        >>> loss.sum(), metrics["clipped"].sum()  # -min(3, 1.2)
        (Array(-1.2, dtype=float32), Array(1., dtype=float32))
    """
    _check_clips(clip_low, clip_high, clip_c, ratio)
    logps_BT, old_logps_BT, advantages_BT = wide(logps_BT, old_logps_BT, advantages_BT)
    advantages_BT = jax.lax.stop_gradient(jnp.broadcast_to(advantages_BT, logps_BT.shape))
    own_BT = mask_BT != 0
    log_ratio_BT = jnp.where(own_BT, logps_BT - jax.lax.stop_gradient(old_logps_BT), 0)
    log_ratio_BT = jnp.clip(log_ratio_BT, -_FAR, _FAR)
    if ratio != "token":
        total_BT = per_sequence_sum(log_ratio_BT, segment_ids_BT)
        if ratio == "sequence":
            count_BT = per_sequence_sum(own_BT.astype(total_BT.dtype), segment_ids_BT)
            total_BT = total_BT / jnp.maximum(count_BT, 1)
        used_BT = jnp.where(own_BT, jnp.clip(total_BT, -_FAR, _FAR), 0)
    else:
        used_BT = log_ratio_BT
    ratio_BT = jnp.exp(used_BT)
    low = 0.0 if clip_low is None else 1 - clip_low
    high = jnp.inf if clip_high is None else 1 + clip_high
    gain_BT = ratio_BT * advantages_BT
    surrogate_BT = jnp.minimum(gain_BT, jnp.clip(ratio_BT, low, high) * advantages_BT)
    clipped_BT = jnp.where(advantages_BT > 0, ratio_BT > high, ratio_BT < low)
    clipped_BT &= advantages_BT != 0
    if clip_c is not None:
        floor_BT = clip_c * advantages_BT
        clipped_BT |= (advantages_BT < 0) & (surrogate_BT < floor_BT)
        lifted_BT = jnp.maximum(surrogate_BT, floor_BT)
        surrogate_BT = jnp.where(advantages_BT < 0, lifted_BT, surrogate_BT)
    if is_weights_BT is not None:
        surrogate_BT *= jax.lax.stop_gradient(is_weights_BT)
    return jnp.where(own_BT, -surrogate_BT, 0), reported(
        ratio=ratio_BT,
        clipped=jnp.where(own_BT, clipped_BT, False).astype(ratio_BT.dtype),
        approx_kl=jnp.expm1(log_ratio_BT) - log_ratio_BT,
    )


@jax.named_scope("loss")
def kl_penalty(
    logps_BT: jax.Array,
    ref_logps_BT: jax.Array,
    *,
    estimator: Literal["k1", "k2", "k3"] = "k3",
    gradient: Literal["unbiased", "estimator"] = "unbiased",
) -> jax.Array:
    """Estimate KL(policy || reference) from the tokens that the policy drew (Schulman 2020).

    With d = log policy - log reference at the token drawn:
    k1 = d (unbiased, may be negative), k2 = d ** 2 / 2 (low variance, biased),
    k3 = exp(-d) - 1 + d (unbiased, never negative).

    What their VALUE estimates and what their GRADIENT estimates are two things. The gradient of k1
    is 0 in the mean; that of k3 is the gradient of KL(reference || policy). On tokens that the
    policy drew, it is k2's gradient, d grad log policy, whose mean is the gradient of
    KL(policy || reference) (Tang and Munos 2025). `gradient="unbiased"` has it for every
    estimator. `gradient="estimator"` differentiates the formula as it stands, as the GRPO paper
    does for k3 (Shao et al. 2024, equation 4).

    Args:
        logps_BT: log-probabilities under the model that is trained.
        ref_logps_BT: under the reference; no gradient.
        estimator: which formula gives the value.
        gradient: what is differentiated.

    Returns:
        [B, T]. As part of a reward, put `stop_gradient` around it (k1 is usual there).

    Raises:
        ConfigError: for another name.

    Example:
        >>> kl_penalty(jnp.zeros((1, 1)), jnp.full((1, 1), -0.5), estimator="k2")
        Array([[0.125]], dtype=float32)
    """
    _check_name("estimator", estimator, ("k1", "k2", "k3"))
    _check_name("gradient", gradient, ("unbiased", "estimator"))
    logps_BT, ref_logps_BT = wide(logps_BT, ref_logps_BT)
    d_BT = logps_BT - jax.lax.stop_gradient(ref_logps_BT)
    k2_BT = 0.5 * d_BT**2
    value_BT = {"k1": d_BT, "k2": k2_BT, "k3": jnp.expm1(-d_BT) + d_BT}[estimator]
    if gradient == "estimator" or estimator == "k2":
        return value_BT
    return jax.lax.stop_gradient(value_BT) + (k2_BT - jax.lax.stop_gradient(k2_BT))


@jax.named_scope("loss")
def truncated_importance(
    train_logps_BT: jax.Array,
    sampler_logps_BT: jax.Array,
    mask_BT: jax.Array,
    *,
    cap: float = 2.0,
    floor: float | None = None,
    level: Literal["token", "sequence"] = "token",
    outside: Literal["truncate", "drop"] = "truncate",
    segment_ids_BT: jax.Array | None = None,
) -> tuple[jax.Array, Metrics]:
    """Weights that correct for a sampler whose numbers differ from the trainer's.

    w = exp(log trainer - log sampler) of each token, or of each sequence as the product over its
    tokens, truncated to [floor, cap] (truncated importance sampling; Yao et al. 2025), or 0 where
    it lies outside (masked importance sampling).

    Args:
        train_logps_BT: the trainer's log-probabilities under the weights that sampled.
        sampler_logps_BT: those the sampler reported. A NaN counts as no difference.
        mask_BT: not 0 for the tokens that the model itself wrote.
        cap: above 0.
        floor: 0 or more, at most `cap`; None for none.
        level: what is weighted.
        outside: what becomes of weights outside the range.
        segment_ids_BT: the sequences inside packed rows, 0 for padding; None: a row is a sequence.

    Returns:
        weights [B, T] without gradient, 1 outside the mask; metrics [B, T]: importance (before
        truncation), truncated (1 where outside the range), mismatch_kl (k3 of KL(sampler ||
        trainer) at each token).

    Raises:
        ConfigError: ranges or names that make no sense.

    Example:
        >>> one = jnp.ones((1, 1))
        >>> truncated_importance(jnp.log(3 * one), 0 * one, one, cap=2.0)[0]
        Array([[2.]], dtype=float32)
    """
    _check_name("level", level, ("token", "sequence"))
    _check_name("outside", outside, ("truncate", "drop"))
    lowest = 0.0 if floor is None else floor
    if not 0 <= lowest <= cap or not cap > 0:
        raise ConfigError(
            f"truncated_importance: cap={cap} and floor={floor} must satisfy 0 <= floor <= cap, "
            "and cap be above 0; 2 is usual"
        )
    train_logps_BT, sampler_logps_BT = wide(train_logps_BT, sampler_logps_BT)
    own_BT = mask_BT != 0
    difference_BT = jax.lax.stop_gradient(train_logps_BT - sampler_logps_BT)
    difference_BT = jnp.where(own_BT & ~jnp.isnan(difference_BT), difference_BT, 0)
    used_BT = difference_BT
    if level == "sequence":
        used_BT = jnp.where(own_BT, per_sequence_sum(difference_BT, segment_ids_BT), 0)
    importance_BT = jnp.exp(jnp.clip(used_BT, -_FAR, _FAR))
    outside_BT = own_BT & ((importance_BT < lowest) | (importance_BT > cap))
    replaced_BT = 0.0 if outside == "drop" else jnp.clip(importance_BT, lowest, cap)
    weights_BT = jnp.where(outside_BT, replaced_BT, importance_BT)
    return weights_BT, reported(
        importance=importance_BT,
        truncated=outside_BT.astype(weights_BT.dtype),
        mismatch_kl=jnp.expm1(difference_BT) - difference_BT,
    )


@jax.named_scope("loss")
def value_loss(
    values_BT: jax.Array,
    returns_BT: jax.Array,
    mask_BT: jax.Array,
    *,
    old_values_BT: jax.Array | None = None,
    clip: float | None = None,
) -> tuple[jax.Array, Metrics]:
    """Half the squared error of a value head, clipped around its old values as PPO's code does.

    loss = max((v - R) ** 2, (v_c - R) ** 2) / 2, v_c = v kept within `clip` of the old value.

    Args:
        values_BT: predicted values.
        returns_BT: R, for instance from `advantages.gae`; no gradient.
        mask_BT: not 0 for the tokens that count.
        old_values_BT: values when the rollout was scored; needed with `clip`.
        clip: above 0; None for no clipping.

    Returns:
        loss [B, T], 0 where the mask is; metrics [B, T]: clipped, squared_error.

    Raises:
        ConfigError: `clip` without old values, or not above 0.
    """
    if clip is not None and (old_values_BT is None or not clip > 0):
        raise ConfigError(
            f"value_loss: clip={clip} must be above 0 and needs old_values_BT; use None for no clip"
        )
    values_BT, returns_BT = wide(values_BT, returns_BT)
    own_BT = mask_BT != 0
    error_BT = (values_BT - jax.lax.stop_gradient(returns_BT)) ** 2
    worst_BT, clipped_BT = error_BT, jnp.zeros_like(own_BT)
    if clip is not None and old_values_BT is not None:
        old_BT = jax.lax.stop_gradient(old_values_BT)
        near_BT = jnp.clip(values_BT, old_BT - clip, old_BT + clip)
        near_error_BT = (near_BT - jax.lax.stop_gradient(returns_BT)) ** 2
        worst_BT = jnp.maximum(error_BT, near_error_BT)
        clipped_BT = own_BT & (near_error_BT > error_BT)
    return jnp.where(own_BT, 0.5 * worst_BT, 0), reported(
        clipped=clipped_BT.astype(error_BT.dtype), squared_error=jnp.where(own_BT, error_BT, 0)
    )


def _check_clips(
    clip_low: float | None, clip_high: float | None, clip_c: float | None, ratio: str
) -> None:
    _check_name("ratio", ratio, ("token", "sequence", "product"))
    if clip_low is not None and not 0 <= clip_low <= 1:
        raise ConfigError(f"clip_low={clip_low} must be between 0 and 1; 0.2 is usual")
    if clip_high is not None and not clip_high >= 0:
        raise ConfigError(f"clip_high={clip_high} must be 0 or more; 0.2 to 0.28 is usual")
    if clip_c is not None and not clip_c > 1:
        raise ConfigError(f"clip_c={clip_c} must be above 1; 3 is usual")


def _check_name(what: str, name: str, known: tuple[str, ...]) -> None:
    if name not in known:
        raise ConfigError(f"{what}={name!r} is unknown; use one of: {', '.join(known)}")
