"""Routers: which experts a token runs through, with which weights, and how evenly.

Legend: M tokens, E experts, k experts per token, G groups of experts, L layers with experts.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from fornax import kernels
from fornax.models.experts_config import ExpertsConfig

__all__ = [
    "Choice",
    "Routing",
    "balanced_bias",
    "choose",
    "count_routing",
    "routed_experts_dtype",
    "router_losses",
]


@dataclass(frozen=True)
class Choice:
    """The experts of each token."""

    weights_Mk: jax.Array
    """float32 factors on the experts' outputs (or inputs)."""
    experts_Mk: jax.Array
    """int32 experts, the best first."""
    scores_ME: jax.Array
    """float32 scores of all experts, without the selection bias."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Routing:
    """What a router did with a batch: float32 sums over its tokens, padding left out.

    Those of a stack of layers have a leading axis L.
    """

    assigned_E: jax.Array
    """Tokens that each expert was chosen for."""
    probability_E: jax.Array
    """Of each expert, its scores divided by the token's sum of scores."""
    squared_log_normaliser: jax.Array
    """Squared log-sum-exp of the logits."""
    entropy: jax.Array
    """Entropy in nats of the scores divided by their sum."""
    tokens: jax.Array
    """How many tokens were counted."""
    dropped_E: jax.Array | None = None
    """Of `assigned_E`, those that the expert had no room for; None where it has room for all."""
    experts_BTk: jax.Array | None = None
    """int32 experts that each token took, where they were asked for."""


def routed_experts_dtype(config: ExpertsConfig) -> np.dtype:
    """The smallest integers that hold each expert, and -1 for none."""
    return np.dtype(np.int8) if config.num_experts <= 128 else np.dtype(np.int16)


def choose(
    logits_ME: jax.Array,
    config: ExpertsConfig,
    selection_bias_E: jax.Array | None = None,
    given_Mk: jax.Array | None = None,
) -> Choice:
    """Choose each token's experts.

    Args:
      logits_ME: float32.
      config: the router's rule.
      selection_bias_E: float32, added to the scores for the choice only.
      given_Mk: integers, the experts of tokens that were routed before (routing replay, Ma et al.
        2025, arXiv:2510.11370, equation 3): the choice is theirs, the weights are those of these
        logits, through which gradients reach the router. Below 0 where the router chooses.
    """
    if config.score == "softmax":
        scores_ME = jax.nn.softmax(logits_ME, axis=-1)
    else:
        scores_ME = jax.nn.sigmoid(logits_ME)
    weights_Mk, experts_Mk = kernels.route_top_k(
        logits_ME,
        config.experts_per_token,
        score=config.score,
        selection_bias_E=selection_bias_E,
        num_groups=config.num_groups,
        groups_per_token=config.groups_per_token,
        group_score=config.group_score,
        normalize=config.normalize,
        normalize_eps=config.normalize_eps,
        scale=config.scale,
        given_Mk=given_Mk,
    )
    return Choice(weights_Mk, experts_Mk, scores_ME)


def count_routing(logits_ME: jax.Array, choice: Choice, is_token_M: jax.Array) -> Routing:
    """Sum up what a router did.

    Args:
      logits_ME: float32.
      choice: from `choose`.
      is_token_M: bool, False for padding.
    """
    count_M = is_token_M.astype(jnp.float32)
    num_experts = logits_ME.shape[-1]
    chosen_ME = jnp.sum(jax.nn.one_hot(choice.experts_Mk, num_experts, dtype=jnp.float32), axis=1)
    share_ME = choice.scores_ME / jnp.sum(choice.scores_ME, axis=-1, keepdims=True)
    normaliser_M = jax.nn.logsumexp(logits_ME, axis=-1)
    entropy_M = -jnp.sum(jax.scipy.special.xlogy(share_ME, share_ME), axis=-1)
    return Routing(
        assigned_E=count_M @ chosen_ME,
        probability_E=count_M @ share_ME,
        squared_log_normaliser=jnp.sum(count_M * jnp.square(normaliser_M)),
        entropy=jax.lax.stop_gradient(jnp.sum(count_M * entropy_M)),
        tokens=jnp.sum(count_M),
    )


def router_losses(routing: Routing) -> dict[str, jax.Array]:
    """The losses of routers, float32 scalars, means over layers and tokens.

    Args:
      routing: of a stack of layers.

    Returns:
      `balance`: E sum_e f_e p_e, with f_e the share of tokens that expert e was chosen for and p_e
      its mean probability (Fedus et al. 2021, equations 4 to 6; over k experts per token it is k
      where all are used alike). `router_z`: the mean squared log-sum-exp of the logits (Zoph et
      al. 2022, equation 5).
    """
    tokens_L = jnp.maximum(routing.tokens, 1)
    share_LE = jax.lax.stop_gradient(routing.assigned_E) / tokens_L[:, None]
    mean_LE = routing.probability_E / tokens_L[:, None]
    balance_L = routing.assigned_E.shape[-1] * jnp.sum(share_LE * mean_LE, axis=-1)
    return {
        "balance": jnp.mean(balance_L),
        "router_z": jnp.mean(routing.squared_log_normaliser / tokens_L),
    }


def balanced_bias(bias_LE: jax.Array, assigned_LE: jax.Array, rate: float) -> jax.Array:
    """The selection bias after a step: each expert's moved by `rate` towards the mean load.

    Wang et al. 2024, algorithm 1.

    Args:
      bias_LE: float32.
      assigned_LE: tokens of the step that each expert was chosen for.
      rate: `ExpertsConfig.bias_update_rate`.
    """
    mean_L1 = jnp.mean(assigned_LE, axis=-1, keepdims=True)
    return bias_LE + rate * jnp.sign(mean_L1 - assigned_LE)
