"""Preference optimization from pairs: DPO and its relatives, one forward pass over both answers.

Legend: P pairs, 2 chosen and rejected, T tokens of a row, K positions whose logits are needed.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fornax import adapters
from fornax.models import Remat
from fornax.train.task import Batch, Loss, Task
from fornax.tune import losses
from fornax.tune.completions import Completions, completion_logprobs
from fornax.tune.configs.losses import CPO, DPO, IPO, ORPO, PreferenceLoss, RobustDPO, SimPO
from fornax.tune.configs.preference import PreferenceConfig
from fornax.tune.data import load_pairs
from fornax.tune.pairs import PairRows, reference_of
from fornax.tune.policy import Origin
from fornax.tune.policy import policy as policy_of
from fornax.tune.splits import described, load_splits

__all__ = ["Answers", "make", "needs_reference", "pair_loss", "preference_loss"]

Metrics = dict[str, jax.Array]


class Answers(NamedTuple):
    """What policy and reference think of P pairs."""

    policy: Completions
    """[P, 2]."""
    reference_P2: jax.Array | None
    """Sums of the reference's log-probs; None for losses without a reference."""

    @property
    def compared(self) -> jax.Array:
        """The reference's, where the loss has one."""
        assert self.reference_P2 is not None
        return self.reference_P2


def _dpo(config: DPO, answers: Answers) -> tuple[jax.Array, Metrics]:
    loss_P, metrics = losses.dpo(
        answers.policy.logps,
        answers.compared,
        beta=config.beta,
        label_smoothing=config.label_smoothing,
    )
    return _with_nll(loss_P, metrics, answers, config.nll_weight)


def _robust(config: RobustDPO, answers: Answers) -> tuple[jax.Array, Metrics]:
    return losses.robust_dpo(
        answers.policy.logps,
        answers.compared,
        beta=config.beta,
        label_smoothing=config.label_smoothing,
    )


def _ipo(config: IPO, answers: Answers) -> tuple[jax.Array, Metrics]:
    averages_P2 = losses.average(answers.compared, answers.policy.lengths)
    return losses.ipo(answers.policy.averages, averages_P2, beta=config.beta)


def _simpo(config: SimPO, answers: Answers) -> tuple[jax.Array, Metrics]:
    return losses.simpo(answers.policy.averages, beta=config.beta, gamma=config.gamma)


def _orpo(config: ORPO, answers: Answers) -> tuple[jax.Array, Metrics]:
    loss_P, metrics = losses.orpo(answers.policy.averages, beta=config.beta)
    return _with_nll(loss_P, metrics, answers, 1.0)


def _cpo(config: CPO, answers: Answers) -> tuple[jax.Array, Metrics]:
    loss_P, metrics = losses.cpo(
        answers.policy.logps, beta=config.beta, label_smoothing=config.label_smoothing
    )
    return _with_nll(loss_P, metrics, answers, config.nll_weight)


_LOSSES: dict[type, Callable[[Any, Answers], tuple[jax.Array, Metrics]]] = {
    DPO: _dpo,
    RobustDPO: _robust,
    IPO: _ipo,
    SimPO: _simpo,
    ORPO: _orpo,
    CPO: _cpo,
}


def _with_nll(
    loss_P: jax.Array, metrics: Metrics, answers: Answers, weight: float
) -> tuple[jax.Array, Metrics]:
    """Adds the chosen completion's mean negative log-likelihood.

    A mean over the completion and then over pairs, so that micro-batches add up; TRL's mean over
    all tokens of a micro-batch depends on how the batch was divided.
    """
    if not weight:
        return loss_P, metrics
    return loss_P - weight * answers.policy.averages[..., 0], metrics


def needs_reference(loss: PreferenceLoss) -> bool:
    """Whether a loss compares the policy with a reference."""
    return isinstance(loss, DPO | RobustDPO | IPO)


def pair_loss(config: PreferenceLoss, answers: Answers) -> tuple[jax.Array, Metrics]:
    """The loss of each pair [P], and its metrics [P]."""
    loss_P, metrics = _LOSSES[type(config)](config, answers)
    policy = jax.tree.map(jax.lax.stop_gradient, answers.policy)
    for column, name in enumerate(("chosen", "rejected")):
        metrics[f"logps_{name}"] = policy.logps[..., column]
        metrics[f"nll_{name}"] = -policy.averages[..., column]
        metrics[f"length_{name}"] = policy.lengths[..., column]
    if answers.reference_P2 is not None:
        lost_P2 = losses.average(answers.reference_P2 - policy.logps, policy.lengths)
        metrics["drift"] = jnp.mean(lost_P2, axis=-1)
    return loss_P, metrics


def preference_loss(
    model: Any, batch: Batch, config: PreferenceLoss, *, remat: str | Remat = "none"
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
      nats per token by which completions became less likely than under it.
    """
    policy = completion_logprobs(model, batch, remat=remat)
    reference_P2 = None
    if needs_reference(config):
        reference_P2 = batch.get("ref_logps")
        if reference_P2 is None:
            reference_P2 = base_logprobs(model, batch)
    loss_P, metrics = pair_loss(config, Answers(policy=policy, reference_P2=reference_P2))
    real_P = jnp.all(policy.lengths > 0, axis=-1)
    return mean_over(loss_P, metrics, real_P.astype(jnp.float32))


def base_logprobs(model: Any, batch: Batch) -> jax.Array:
    """Sums of log-probs under the model without its adapters: no second copy of its weights."""
    with adapters.disabled(model):
        return jax.lax.stop_gradient(completion_logprobs(model, batch).logps)


def mean_over(loss: jax.Array, metrics: Metrics, weights: jax.Array) -> Loss:
    """The sums whose mean is that of examples with these weights."""
    weight = jnp.sum(weights)

    def total(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(weights > 0, x, 0) * weights)

    return Loss(
        total=total(loss),
        weight=weight,
        metrics={name: (total(value), weight) for name, value in metrics.items()},
    )


def make(config: PreferenceConfig, origin: Origin, out: Path) -> Task:
    """The task of `fornax tune dpo`; its data is read and checked here.

    Raises:
      DataError: with file and line of pairs that cannot be used.
      ConfigError: for a reference model of another vocabulary, or adapters that fit nothing.
    """
    splits = load_splits(config, origin, load_pairs)
    policy = policy_of(config, origin)
    stores = needs_reference(config.loss) and config.reference == "stored"
    remat = config.resolved_remat()

    def loss(model: Any, batch: Batch, key: jax.Array) -> Loss:
        del key
        return preference_loss(model, batch, config.loss, remat=remat)

    return Task(
        build=policy.build,
        pretrained=policy.pretrained,
        trained=policy.trained,
        loss=loss,
        evaluate=lambda model, batch: preference_loss(model, batch, config.loss),
        batches=PairRows(
            config=config,
            splits=splits,
            reference=reference_of(config, origin, policy, out) if stores else None,
        ),
        steps_per_epoch=len(splits["train"]) / config.batch_size,
        unit="pairs",
        notes=(policy.text, *described(splits)),
    )
