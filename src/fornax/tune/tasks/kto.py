"""Kahneman-Tversky optimization: single completions, each labelled desirable or not.

Legend: B examples, 2 (its own completion; another example's, after the same prompt), T tokens.
"""

import functools
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from fornax.config.errors import DataError
from fornax.models import Decoder, Remat
from fornax.train.routing import with_routing
from fornax.train.task import Batch, Loss, Means, Task
from fornax.tune import losses
from fornax.tune.config import KTOConfig
from fornax.tune.data import Encoded, LabelledTokens, Loaded, PairTokens, load_labelled
from fornax.tune.policy import Origin
from fornax.tune.policy import policy as policy_of
from fornax.tune.splits import load_splits
from fornax.tune.tasks.pairs import (
    Completions,
    PairRows,
    completion_logprobs,
    pair_task,
    reference_logprobs,
    reference_of,
)

__all__ = ["make", "mismatched"]

LABEL = "desirable"


def _column(batch: Batch, column: int) -> Batch:
    """The arrays of one of the two completions."""
    return {name: x[:, column] for name, x in batch.items() if x.ndim > 1}


def _log_ratios(
    model: Decoder, batch: Batch, column: int, remat: str | Remat
) -> tuple[Completions, jax.Array]:
    """Completions of the policy, and sums of the reference's log-probs, each [B]."""
    rows = _column(batch, column)
    policy = completion_logprobs(model, rows, remat=remat)
    return policy, reference_logprobs(model, rows)


def kto_baseline(model: Decoder, batch: Batch) -> Means:
    """Sum and weight of the log-ratio of mismatched completions: its mean over the whole batch,
    at least 0, is the KL estimate that rewards are compared with."""
    policy, reference_B = _log_ratios(model, batch, 1, "none")
    real_B = (policy.lengths > 0).astype(jnp.float32)
    return {"kl": (jnp.sum((policy.logps - reference_B) * real_B), jnp.sum(real_B))}


def kto_loss(
    model: Decoder, batch: Batch, *, config: KTOConfig, remat: str | Remat = "none"
) -> Loss:
    """Sums over examples.

    Args:
      model: the policy.
      batch: the arrays of `completion_logprobs` with leading dimensions [B, 2]; ref_logps float32
        [B, 2] unless the reference is the policy without its adapters; desirable float32 [B], 1
        or 0;
        measured/kl, from `kto_baseline`.
      config: its beta and weights.
      remat: what the backward pass computes again.

    Returns:
      The weight counts examples. Metrics: kl; reward_, logps_ of desirable and undesirable
      examples, each over its own; reward_margin; accuracy, how many lie on their side of the
      baseline; of a model with experts those of `with_routing`.
    """
    policy, reference_B = _log_ratios(model, batch, 0, remat)
    desirable_B = batch[LABEL] > 0
    kl = jnp.maximum(batch["measured/kl"], 0)
    loss_B, found = losses.kto(
        policy.logps,
        reference_B,
        desirable_B,
        kl,
        beta=config.beta,
        desirable_weight=config.desirable_weight,
        undesirable_weight=config.undesirable_weight,
    )
    real_B = (policy.lengths > 0).astype(jnp.float32)
    weight = jnp.sum(real_B)
    logps_B = jax.lax.stop_gradient(policy.logps)
    metrics = {
        "kl": (kl * weight, weight),
        "accuracy": (jnp.sum(found["accuracy"] * real_B), weight),
    }
    for name, mine_B in (("desirable", desirable_B), ("undesirable", ~desirable_B)):
        counted_B = real_B * mine_B
        count = jnp.sum(counted_B)
        metrics[f"reward_{name}"] = (jnp.sum(found["reward"] * counted_B), count)
        metrics[f"logps_{name}"] = (jnp.sum(logps_B * counted_B), count)
    loss = Loss(total=jnp.sum(loss_B * real_B), weight=weight, metrics=metrics)
    return with_routing(loss, model, policy.routing, balance=False)


def mismatched(items: Sequence[LabelledTokens], max_length: int) -> list[PairTokens]:
    """Each completion beside its prompt with another's completion: the next example's whose prompt
    is another, or the next example's where all have one prompt.

    Which one it is stays the same for the whole run, so that the reference's log-probs of it can
    be stored. It is cut at `max_length`.

    Raises:
      DataError: when there is but one example.
    """
    if len(items) < 2:
        raise DataError(
            "KTO compares completions with those of other prompts, and there is one example; give "
            "it more"
        )
    partners = _partners([item.sequence for item in items])
    return [
        PairTokens(
            chosen=item.sequence,
            rejected=_answered_by(item.sequence, items[partner].sequence, max_length),
        )
        for item, partner in zip(items, partners, strict=True)
    ]


def _partners(sequences: Sequence[Encoded]) -> list[int]:
    count = len(sequences)
    prompts = [s.tokens[: s.prompt].tobytes() for s in sequences]
    partners = [0] * count
    for place in reversed(range(2 * count)):  # twice, for those that find theirs past the end
        here, following = place % count, (place + 1) % count
        alike = prompts[here] == prompts[following]
        partners[here] = partners[following] if alike else following
    if len(set(prompts)) == 1:
        return [(place + 1) % count for place in range(count)]
    return partners


def _answered_by(own: Encoded, other: Encoded, max_length: int) -> Encoded:
    """A prompt with another sequence's completion."""
    tokens = np.concatenate([own.tokens[: own.prompt], other.tokens[other.prompt :]])
    mask = np.concatenate([np.zeros(own.prompt, bool), other.mask[other.prompt :]])
    return Encoded(tokens=tokens[:max_length], mask=mask[:max_length], prompt=own.prompt)


def make(config: KTOConfig, origin: Origin, out: Path) -> Task:
    """The task of `fornax tune kto`; its data is read and checked here.

    Raises:
      DataError: with file and line of examples that cannot be used.
      ConfigError: for a reference model of another vocabulary, or adapters that fit nothing.
    """
    labelled = load_splits(config, origin, load_labelled)
    splits = {
        name: Loaded(items=mismatched(loaded.items, config.max_length), summary=loaded.summary)
        for name, loaded in labelled.items()
    }
    columns = {
        name: {LABEL: np.asarray([item.label for item in loaded.items], np.float32)}
        for name, loaded in labelled.items()
    }
    policy = policy_of(config, origin)
    return pair_task(
        config,
        policy,
        splits,
        loss=functools.partial(kto_loss, config=config),
        batches=PairRows(
            config=config,
            splits=splits,
            columns=columns,
            reference=reference_of(config, origin, policy, out),
        ),
        unit="examples",
        measure=kto_baseline,
        notes=(_balance(labelled["train"], config),),
    )


def _balance(loaded: Loaded[LabelledTokens], config: KTOConfig) -> str:
    """A line for the log, with a warning where one kind of label outweighs the other."""
    desirable = sum(item.label for item in loaded.items)
    other = len(loaded.items) - desirable
    counts = f"{desirable:,} examples are desirable, {other:,} are not"
    if not desirable or not other:
        return f"{counts}: with only one kind there is nothing to compare"
    balance = config.desirable_weight * desirable / (config.undesirable_weight * other)
    if 1 / 4 <= balance <= 4:
        return counts
    weight = config.desirable_weight * desirable / other
    return (
        f"{counts}: with their weights they stand {balance:.2g} to 1, where the paper keeps them "
        f"within 1 and 4/3, for instance by undesirable_weight={weight:.2g}"
    )
