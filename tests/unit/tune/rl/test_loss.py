"""The divergence in the loss pulls the policy towards its reference, whichever estimator it has."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fornax.models import TokenLogprobs
from fornax.tune.config import Estimator
from fornax.tune.rl.loss import PolicyLoss, policy_loss

LOGITS = np.array([0.3, -1.2, 0.8, 0.1, -0.4])
REFERENCE = np.log(np.array([0.1, 0.4, 0.2, 0.05, 0.25]))
OPTIONS = PolicyLoss(clip_low=0.2, clip_high=0.2, kl_coefficient=0.5)


def divergence(logits: np.ndarray) -> tuple[float, float]:
    """KL(policy | reference) and KL(reference | policy), float64."""
    logps = logits - np.log(np.exp(logits).sum())
    ahead = np.sum(np.exp(logps) * (logps - REFERENCE))
    return float(ahead), float(np.sum(np.exp(REFERENCE) * (REFERENCE - logps)))


def slope(which: int) -> np.ndarray:
    """Central differences of one of the two."""
    steps = 1e-5 * np.eye(len(LOGITS))
    return np.array(
        [(divergence(LOGITS + s)[which] - divergence(LOGITS - s)[which]) / 2e-5 for s in steps]
    )


@pytest.mark.parametrize(("estimator", "which"), [("k1", 0), ("k2", 0), ("k3", 1)])
def test_the_mean_gradient_of_the_loss_is_that_of_a_divergence(
    estimator: Estimator, which: int
) -> None:
    """Each of five tokens is a sequence, weighed by how often the policy draws it."""
    often = np.exp(LOGITS) / np.exp(LOGITS).sum()
    column = np.zeros((len(LOGITS), 1), np.float32)
    options = dataclasses.replace(OPTIONS, kl_estimator=estimator)
    batch: dict[str, Any] = {
        "loss_mask": column + 1,
        "advantages": column,
        "sampler_logps": np.log(often)[:, None].astype(np.float32),
        "ref_logps": REFERENCE[:, None].astype(np.float32),
        "token_weights": often[:, None].astype(np.float32),
        "sequence_weights": often.astype(np.float32),
        "segment_ids": np.ones_like(column, np.int32),
    }

    def total(logits: jax.Array) -> jax.Array:
        logps = jax.nn.log_softmax(logits)[:, None]
        return policy_loss(options, batch, TokenLogprobs(logps, jnp.zeros_like(logps))).total

    found = jax.jit(jax.grad(total))(jnp.asarray(LOGITS, jnp.float32))
    np.testing.assert_allclose(found, 0.5 * slope(which), atol=1e-6)
    assert np.abs(found).max() > 0.01
