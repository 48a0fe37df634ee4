"""Losses over completions that are preferred or not: DPO and its relatives, KTO, Bradley-Terry.

Legend: P pairs; an axis of 2 holds the chosen and the rejected completion; B single completions.
Log-probabilities are of the completion's tokens, the end of sequence included: summed (`logps`) or
averaged (`avg_logps`).
"""

import jax
import jax.numpy as jnp

from fornax.config.errors import ConfigError
from fornax.tune.losses._arrays import Metrics, log_one_minus_exp, reported, smoothed, wide

__all__ = [
    "average",
    "bradley_terry",
    "cpo",
    "dpo",
    "ipo",
    "kto",
    "kto_kl",
    "orpo",
    "robust_dpo",
    "simpo",
]


def average(logps: jax.Array, lengths: jax.Array) -> jax.Array:
    """Return summed log-probabilities divided by their numbers of tokens (an empty one: by 1)."""
    return logps / jnp.maximum(lengths, 1)


@jax.named_scope("loss")
def dpo(
    policy_logps_P2: jax.Array,
    ref_logps_P2: jax.Array,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> tuple[jax.Array, Metrics]:
    """Direct preference optimisation (Rafailov et al. 2023, equation 7); cDPO with smoothing.

    With r = beta (log policy - log reference) of each completion and m = r_chosen - r_rejected:
    loss = -(1 - e) log sigmoid(m) - e log sigmoid(-m). `label_smoothing` e above 0 is cDPO
    (Mitchell 2023): the share of pairs that may be labelled the wrong way round.

    Args:
        policy_logps_P2: summed log-probabilities under the model that is trained.
        ref_logps_P2: the same under the reference; no gradient.
        beta: strength of the tie to the reference, above 0.
        label_smoothing: e, 0 to below 0.5.

    Returns:
        loss [P]; metrics [P]: reward_chosen, reward_rejected, reward_margin, accuracy.

    Raises:
        ConfigError: `beta` or `label_smoothing` out of its range, or arrays that are not pairs.

    Example:
        >>> loss, metrics = dpo(jnp.array([[-5.0, -9.0]]), jnp.array([[-6.0, -8.0]]))
        >>> round(float(loss[0]), 4)  # -log sigmoid(0.1 * 2)
        0.5981
    """
    _check("dpo", policy_logps_P2, beta, label_smoothing)
    rewards_P2 = _rewards(policy_logps_P2, ref_logps_P2, beta)
    return smoothed(_margin(rewards_P2), label_smoothing), _metrics(rewards_P2)


@jax.named_scope("loss")
def robust_dpo(
    policy_logps_P2: jax.Array,
    ref_logps_P2: jax.Array,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.1,
) -> tuple[jax.Array, Metrics]:
    """DPO, unbiased under labels flipped at a known rate (Chowdhury et al. 2024).

    loss = (-(1 - e) log sigmoid(m) + e log sigmoid(-m)) / (1 - 2 e), m as in `dpo`. Its mean over
    pairs whose labels are flipped with probability e is DPO's over the true ones. Unbounded below:
    watch the margin.

    Args:
        policy_logps_P2: summed log-probabilities under the model that is trained.
        ref_logps_P2: the same under the reference; no gradient.
        beta: strength of the tie to the reference, above 0.
        label_smoothing: e, the rate at which labels are flipped, 0 to below 0.5.

    Returns:
        loss [P] and the metrics of `dpo`.

    Raises:
        ConfigError: see `dpo`.
    """
    _check("robust_dpo", policy_logps_P2, beta, label_smoothing)
    rewards_P2 = _rewards(policy_logps_P2, ref_logps_P2, beta)
    margin_P, e = _margin(rewards_P2), label_smoothing
    right_P, wrong_P = jax.nn.log_sigmoid(margin_P), jax.nn.log_sigmoid(-margin_P)
    return (-(1 - e) * right_P + e * wrong_P) / (1 - 2 * e), _metrics(rewards_P2)


@jax.named_scope("loss")
def ipo(
    policy_avg_logps_P2: jax.Array, ref_avg_logps_P2: jax.Array, *, beta: float = 0.1
) -> tuple[jax.Array, Metrics]:
    """Identity preference optimisation (Azar et al. 2023, equation 17).

    loss = (h_chosen - h_rejected - 1 / (2 beta)) ** 2, h = log policy - log reference, a token's
    average. The paper's tau is `beta`. It does not say whether h is summed; its authors averaged,
    and a sum would tie the loss to the length.

    Args:
        policy_avg_logps_P2: averaged log-probabilities under the model that is trained.
        ref_avg_logps_P2: the same under the reference; no gradient.
        beta: above 0; the loss is least where the margin of h is 1 / (2 beta).

    Returns:
        loss [P] and the metrics of `dpo`, rewards being beta times the average h.

    Raises:
        ConfigError: see `dpo`.
    """
    _check("ipo", policy_avg_logps_P2, beta, 0.0)
    rewards_P2 = _rewards(policy_avg_logps_P2, ref_avg_logps_P2, beta)
    return (_margin(rewards_P2) / beta - 1 / (2 * beta)) ** 2, _metrics(rewards_P2)


@jax.named_scope("loss")
def simpo(
    avg_logps_P2: jax.Array,
    *,
    beta: float = 2.0,
    gamma: float = 1.0,
    label_smoothing: float = 0.0,
) -> tuple[jax.Array, Metrics]:
    """SimPO: no reference, averaged log-probabilities, a margin (Meng et al. 2024, equation 6).

    loss = -(1 - e) log sigmoid(m) - e log sigmoid(-m), m = beta (chosen - rejected) - gamma.

    Args:
        avg_logps_P2: averaged log-probabilities.
        beta: scale of the reward, above 0; larger than DPO's, for an average is small.
        gamma: margin that the rewards should differ by, 0 or more.
        label_smoothing: e, 0 to below 0.5.

    Returns:
        loss [P] and the metrics of `dpo`, rewards being beta times the average.

    Raises:
        ConfigError: see `dpo`, or a negative `gamma`.
    """
    _check("simpo", avg_logps_P2, beta, label_smoothing)
    if gamma < 0:
        raise ConfigError(f"simpo: gamma={gamma} must be 0 or more; it is the margin to reach")
    (avg_logps_P2,) = wide(avg_logps_P2)
    rewards_P2 = beta * avg_logps_P2
    return smoothed(_margin(rewards_P2) - gamma, label_smoothing), _metrics(rewards_P2)


@jax.named_scope("loss")
def orpo(avg_logps_P2: jax.Array, *, beta: float = 0.1) -> tuple[jax.Array, Metrics]:
    """The odds-ratio part of ORPO (Hong et al. 2024, equations 6 and 7).

    loss = -beta log sigmoid(log odds_chosen - log odds_rejected), odds = p / (1 - p), where log p
    is the AVERAGE log-probability of a token: of a sum, 1 - p is 1 and the odds say nothing. The
    whole of ORPO adds the negative log-likelihood of the chosen completion.

    Args:
        avg_logps_P2: averaged log-probabilities, below 0.
        beta: weight of this part, the paper's lambda, above 0.

    Returns:
        loss [P], times beta already; the metrics of `dpo`, rewards being beta times the average,
        and log_odds_ratio [P].

    Raises:
        ConfigError: see `dpo`.
    """
    _check("orpo", avg_logps_P2, beta, 0.0)
    (avg_logps_P2,) = wide(avg_logps_P2)
    log_odds_P = _margin(avg_logps_P2 - log_one_minus_exp(avg_logps_P2))
    metrics = _metrics(beta * avg_logps_P2) | reported(log_odds_ratio=log_odds_P)
    return -beta * jax.nn.log_sigmoid(log_odds_P), metrics


@jax.named_scope("loss")
def cpo(
    policy_logps_P2: jax.Array, *, beta: float = 0.1, label_smoothing: float = 0.0
) -> tuple[jax.Array, Metrics]:
    """The preference part of contrastive preference optimisation (Xu et al. 2024).

    DPO with a uniform reference: loss = -(1 - e) log sigmoid(m) - e log sigmoid(-m), m = beta times
    (log policy of chosen - log policy of rejected). The whole of CPO adds the negative
    log-likelihood of the chosen completion, which keeps its probability from falling.

    Args:
        policy_logps_P2: summed log-probabilities.
        beta: scale of the reward, above 0.
        label_smoothing: e, 0 to below 0.5.

    Returns:
        loss [P] and the metrics of `dpo`, rewards being beta times the sum.

    Raises:
        ConfigError: see `dpo`.
    """
    _check("cpo", policy_logps_P2, beta, label_smoothing)
    (policy_logps_P2,) = wide(policy_logps_P2)
    rewards_P2 = beta * policy_logps_P2
    return smoothed(_margin(rewards_P2), label_smoothing), _metrics(rewards_P2)


def _check(name: str, logps_P2: jax.Array, beta: float, label_smoothing: float) -> None:
    if jnp.shape(logps_P2)[-1:] != (2,):
        raise ConfigError(
            f"{name}: log-probabilities have the shape {jnp.shape(logps_P2)}; the last axis must "
            "hold two, the chosen and the rejected completion's"
        )
    if not beta > 0:
        raise ConfigError(f"{name}: beta={beta} must be above 0; 0.1 is usual")
    if not 0 <= label_smoothing < 0.5:
        raise ConfigError(
            f"{name}: label_smoothing={label_smoothing} must be at least 0 and below 0.5, where "
            "labels say nothing"
        )


def _rewards(policy_P2: jax.Array, ref_P2: jax.Array, beta: float) -> jax.Array:
    policy_P2, ref_P2 = wide(policy_P2, ref_P2)
    return beta * (policy_P2 - jax.lax.stop_gradient(ref_P2))


def _margin(values_P2: jax.Array) -> jax.Array:
    return values_P2[..., 0] - values_P2[..., 1]


def _metrics(rewards_P2: jax.Array) -> Metrics:
    margin_P = _margin(rewards_P2)
    return reported(
        reward_chosen=rewards_P2[..., 0],
        reward_rejected=rewards_P2[..., 1],
        reward_margin=margin_P,
        accuracy=(margin_P > 0).astype(rewards_P2.dtype),
    )


@jax.named_scope("loss")
def bradley_terry(
    scores_P2: jax.Array, margin_P: jax.Array | None = None, *, centre: float = 0.0
) -> tuple[jax.Array, Metrics]:
    """The Bradley-Terry log-loss of a pair of scores.

    loss = -log sigmoid(s_chosen - s_rejected - margin) + centre (s_chosen + s_rejected) ** 2.
    The margin is Llama 2's (Touvron et al. 2023, equation 2); the last term keeps scores around 0
    (Eisenstein et al. 2023), which the rest leaves open.

    Args:
        scores_P2: the model's scores of both completions.
        margin_P: by how much the scores should differ; None for 0.
        centre: weight of the last term, 0 or more; 0.01 is usual.

    Returns:
        loss [P]; metrics [P]: reward_chosen, reward_rejected, reward_margin, accuracy.

    Raises:
        ConfigError: a negative `centre`, or scores that are not pairs.

    Example:
        >>> loss, _ = bradley_terry(jnp.array([[1.0, 0.0]]))
        >>> round(float(loss[0]), 4)  # -log sigmoid(1)
        0.3133
    """
    if jnp.shape(scores_P2)[-1:] != (2,):
        raise ConfigError(
            f"bradley_terry: scores have the shape {jnp.shape(scores_P2)}; the last axis must hold "
            "two, the chosen and the rejected completion's"
        )
    if centre < 0:
        raise ConfigError(f"bradley_terry: centre={centre} must be 0 or more; 0.01 is usual")
    (scores_P2,) = wide(scores_P2)
    chosen_P, rejected_P = scores_P2[..., 0], scores_P2[..., 1]
    difference_P = chosen_P - rejected_P
    wanted_P = 0 if margin_P is None else jax.lax.stop_gradient(margin_P)
    loss_P = -jax.nn.log_sigmoid(difference_P - wanted_P) + centre * (chosen_P + rejected_P) ** 2
    return loss_P, reported(
        reward_chosen=chosen_P,
        reward_rejected=rejected_P,
        reward_margin=difference_P,
        accuracy=(difference_P > 0).astype(loss_P.dtype),
    )


@jax.named_scope("loss")
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


@jax.named_scope("loss")
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
