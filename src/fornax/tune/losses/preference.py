"""Losses over pairs of completions, one preferred: DPO and its relatives.

Legend: P pairs; an axis of 2 holds the chosen and the rejected completion. Log-probabilities are of
the completion's tokens, the end of sequence included: summed (`logps`) or averaged (`avg_logps`).
"""

import jax
import jax.numpy as jnp

from fornax.config.errors import ConfigError
from fornax.tune.losses._arrays import Metrics, log_one_minus_exp, reported, smoothed, wide

__all__ = ["average", "cpo", "dpo", "ipo", "orpo", "robust_dpo", "simpo"]


def average(logps: jax.Array, lengths: jax.Array) -> jax.Array:
    """Return summed log-probabilities divided by their numbers of tokens (an empty one: by 1)."""
    return logps / jnp.maximum(lengths, 1)


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
