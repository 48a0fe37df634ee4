"""KTO: completions labelled good or bad, without pairs.

Legend: B completions.
"""

import jax
import jax.numpy as jnp

from fornax.config.errors import ConfigError
from fornax.tune.losses._arrays import Metrics, reported, wide

__all__ = ["kto", "kto_kl"]


def kto(
    policy_logps_B: jax.Array,
    ref_logps_B: jax.Array,
    desirable_B: jax.Array,
    kl: jax.Array | float,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> tuple[jax.Array, Metrics]:
    """Kahneman-Tversky optimisation (Ethayarajh et al. 2024).

    With h = log policy - log reference of a completion and z = `kl`:
    loss = desirable_weight (1 - sigmoid(beta (h - z))) for a desirable one,
    loss = undesirable_weight (1 - sigmoid(beta (z - h))) for an undesirable one.

    Args:
        policy_logps_B: summed log-probabilities under the model that is trained.
        ref_logps_B: the same under the reference; no gradient.
        desirable_B: whether each completion is desirable.
        kl: the baseline z, a scalar, from `kto_kl`; no gradient. 0 is allowed.
        beta: strength of the tie to the reference, above 0.
        desirable_weight: set both weights so that weight times number of examples is about equal.
        undesirable_weight: the same of the others.

    Returns:
        loss [B]; metrics [B]: reward (beta h), accuracy (whether h is on its label's side of z).

    Raises:
        ConfigError: `beta` or a weight out of its range.

    Example:
        >>> loss, _ = kto(jnp.array([-5.0]), jnp.array([-6.0]), jnp.array([True]), 0.5)
        >>> round(float(loss[0]), 4)  # 1 - sigmoid(0.1 * (1 - 0.5))
        0.4875
    """
    if not beta > 0:
        raise ConfigError(f"kto: beta={beta} must be above 0; 0.1 is usual")
    if desirable_weight < 0 or undesirable_weight < 0:
        raise ConfigError(
            f"kto: desirable_weight={desirable_weight} and undesirable_weight="
            f"{undesirable_weight} must be 0 or more"
        )
    policy_logps_B, ref_logps_B = wide(policy_logps_B, ref_logps_B)
    ratio_B = policy_logps_B - jax.lax.stop_gradient(ref_logps_B)
    desirable_B = jnp.asarray(desirable_B, bool)
    gain_B = jnp.where(desirable_B, 1.0, -1.0) * (ratio_B - jax.lax.stop_gradient(kl))
    weight_B = jnp.where(desirable_B, desirable_weight, undesirable_weight)
    loss_B = weight_B * jax.nn.sigmoid(-beta * gain_B)
    accuracy_B = (gain_B > 0).astype(loss_B.dtype)
    return loss_B, reported(reward=beta * ratio_B, accuracy=accuracy_B)


def kto_kl(
    policy_logps_B: jax.Array, ref_logps_B: jax.Array, weights_B: jax.Array | None = None
) -> jax.Array:
    """The baseline of `kto`: how far the policy is from the reference on mismatched completions.

    max(0, mean(log policy - log reference)) over completions that belong to OTHER prompts, without
    a gradient. The mean is over the whole batch: a micro-batch's own would change the loss.

    Args:
        policy_logps_B: summed log-probabilities of completions of other prompts.
        ref_logps_B: the same under the reference.
        weights_B: 0 for rows that only fill up the batch.
    """
    policy_logps_B, ref_logps_B = wide(policy_logps_B, ref_logps_B)
    weights_B = jnp.ones_like(policy_logps_B) if weights_B is None else weights_B
    total = jnp.sum(jnp.where(weights_B > 0, weights_B * (policy_logps_B - ref_logps_B), 0))
    return jax.lax.stop_gradient(jnp.maximum(total / jnp.maximum(jnp.sum(weights_B), 1e-9), 0))
