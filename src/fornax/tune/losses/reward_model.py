"""The loss that a reward model learns from pairs.

Legend: P pairs; an axis of 2 holds the chosen and the rejected completion.
"""

import jax
import jax.numpy as jnp

from fornax.config.errors import ConfigError
from fornax.tune.losses._arrays import Metrics, reported, wide

__all__ = ["bradley_terry"]


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
