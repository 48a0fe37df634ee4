"""Preference optimization from pairs: DPO and its relatives, one forward pass over both answers.

Legend: P pairs, 2 chosen and rejected, T tokens of a row, K positions whose logits are needed.
"""

import functools
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fornax.models import Decoder, Remat
from fornax.train.routing import with_routing
from fornax.train.task import Batch, Loss, Task
from fornax.tune import losses
from fornax.tune.config import (
    CPO,
    DPO,
    IPO,
    ORPO,
    PreferenceConfig,
    PreferenceLoss,
    RobustDPO,
    SimPO,
)
from fornax.tune.data import load_pairs
from fornax.tune.policy import Origin
from fornax.tune.policy import policy as policy_of
from fornax.tune.splits import load_splits
from fornax.tune.tasks.pairs import (
    Completions,
    PairRows,
    completion_logprobs,
    mean_over,
    pair_task,
    reference_logprobs,
    reference_of,
)

__all__ = ["Answers", "make", "pair_loss"]

Metrics = dict[str, jax.Array]


class Answers(NamedTuple):
    """Log-probs of P pairs under policy and reference."""

    policy: Completions
    """[P, 2]."""
    reference_P2: jax.Array | None
    """Sums of the reference's log-probs; None for losses without a reference."""

    @property
    def compared(self) -> jax.Array:
        """The reference's, where the loss has one."""
        assert self.reference_P2 is not None
        return self.reference_P2


def needs_reference(loss: PreferenceLoss) -> bool:
    """Whether a loss compares the policy with a reference."""
    return isinstance(loss, DPO | RobustDPO | IPO)


def pair_loss(config: PreferenceLoss, answers: Answers) -> tuple[jax.Array, Metrics]:
    """The loss of each pair [P], and its metrics [P]."""
    policy, nll_weight = answers.policy, 0.0
    match config:
        case DPO(beta=beta, label_smoothing=smoothing, nll_weight=nll_weight):
            loss_P, metrics = losses.dpo(
                policy.logps, answers.compared, beta=beta, label_smoothing=smoothing
            )
        case RobustDPO(beta=beta, label_smoothing=smoothing):
            loss_P, metrics = losses.robust_dpo(
                policy.logps, answers.compared, beta=beta, label_smoothing=smoothing
            )
        case IPO(beta=beta):
            averages_P2 = losses.average(answers.compared, policy.lengths)
            loss_P, metrics = losses.ipo(policy.averages, averages_P2, beta=beta)
        case SimPO(beta=beta, gamma=gamma):
            loss_P, metrics = losses.simpo(policy.averages, beta=beta, gamma=gamma)
        case ORPO(beta=beta):
            nll_weight = 1.0
            loss_P, metrics = losses.orpo(policy.averages, beta=beta)
        case CPO(beta=beta, label_smoothing=smoothing, nll_weight=nll_weight):
            loss_P, metrics = losses.cpo(policy.logps, beta=beta, label_smoothing=smoothing)
    if nll_weight:
        # A mean over the completion and then over pairs, so that micro-batches add up; TRL's mean
        # over all tokens of a micro-batch depends on how the batch was divided.
        loss_P = loss_P - nll_weight * policy.averages[..., 0]
    policy = jax.tree.map(jax.lax.stop_gradient, policy)
    for column, name in enumerate(("chosen", "rejected")):
        metrics[f"logps_{name}"] = policy.logps[..., column]
        metrics[f"nll_{name}"] = -policy.averages[..., column]
        metrics[f"length_{name}"] = policy.lengths[..., column]
    if answers.reference_P2 is not None:
        lost_P2 = losses.average(answers.reference_P2 - policy.logps, policy.lengths)
        metrics["drift"] = jnp.mean(lost_P2, axis=-1)
    return loss_P, metrics


def preference_loss(
    model: Decoder, batch: Batch, *, config: PreferenceLoss, remat: str | Remat = "none"
) -> Loss:
    """Sums over pairs.

    Args:
      model: the policy.
      batch: the arrays of `completion_logprobs` with leading dimensions [P, 2]; ref_logps float32
        [P, 2] unless the reference is the policy without its adapters. A row without completions
        fills a batch and does not count.
      config: which loss.
      remat: what the backward pass computes again.

    Returns:
      The weight counts pairs. Metrics: reward_chosen, reward_rejected, reward_margin, accuracy;
      logps_, nll_ (per token) and length_ of chosen and rejected; with a reference `drift`, the
      nats per token by which completions became less likely than under it; of a model with experts
      those of `with_routing`.
    """
    policy = completion_logprobs(model, batch, remat=remat)
    reference_P2 = reference_logprobs(model, batch) if needs_reference(config) else None
    loss_P, metrics = pair_loss(config, Answers(policy=policy, reference_P2=reference_P2))
    real_P = jnp.all(policy.lengths > 0, axis=-1)
    loss = mean_over(loss_P, metrics, real_P.astype(jnp.float32))
    return with_routing(loss, model, policy.routing, balance=False)


def make(config: PreferenceConfig, origin: Origin, out: Path) -> Task:
    """The task of `fornax tune dpo`; its data is read and checked here.

    Raises:
      DataError: with file and line of pairs that cannot be used.
      ConfigError: for a reference model of another vocabulary, or adapters that fit nothing.
    """
    splits = load_splits(config, origin, load_pairs)
    policy = policy_of(config, origin)
    compares = needs_reference(config.loss)
    reference = reference_of(config, origin, policy, out) if compares else None
    return pair_task(
        config,
        policy,
        splits,
        loss=functools.partial(preference_loss, config=config.loss),
        batches=PairRows(config=config, splits=splits, reference=reference),
        unit="pairs",
    )
