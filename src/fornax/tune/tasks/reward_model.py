"""The task of `fornax tune reward`: score the better completion of a pair higher.

Legend: P pairs, T tokens of a row.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from fornax.models import Remat
from fornax.train.task import Batch, Batches, Hosts, Loss, Task
from fornax.tune import losses
from fornax.tune.configs.reward_model import RewardModelConfig
from fornax.tune.data import load_pairs, preference_batches
from fornax.tune.policy import Origin
from fornax.tune.reward_head import scored, scores
from fornax.tune.splits import described, feed_of, load_splits
from fornax.tune.tasks.preference import mean_over

__all__ = ["make", "reward_loss"]


def reward_loss(
    model: Any, batch: Batch, *, centre: float = 0.0, remat: str | Remat = "none"
) -> Loss:
    """Sums over pairs of the Bradley-Terry loss.

    Args:
      model: a decoder with a `reward_head`.
      batch: tokens, positions, segment_ids int32 [P, 2, T]; margin float32 [P] where the data has
        margins. A row of padding does not count.
      centre: weight of the squared sum of a pair's scores.
      remat: what the backward pass computes again.

    Returns:
      The weight counts pairs. Metrics: reward_chosen, reward_rejected, reward_margin, accuracy.
    """
    scores_P2 = scores(model, batch, remat=remat)
    loss_P, metrics = losses.bradley_terry(scores_P2, batch.get("margin"), centre=centre)
    real_P = jnp.all(jnp.any(batch["segment_ids"] > 0, axis=-1), axis=-1)
    return mean_over(loss_P, metrics, real_P.astype(jnp.float32))


def make(config: RewardModelConfig, origin: Origin, out: Path) -> Task:
    """The task of `fornax tune reward`; its data is read and checked here.

    Raises:
      DataError: with file and line of pairs that cannot be used.
      ConfigError: for adapters that fit nothing.
    """
    del out
    splits = load_splits(config, origin, load_pairs)
    policy = scored(config, origin)
    remat = config.resolved_remat()

    def loss(model: Any, batch: Batch, key: jax.Array) -> Loss:
        del key
        return reward_loss(model, batch, centre=config.centre, remat=remat)

    def stream(split: str, hosts: Hosts) -> Batches:
        feed = feed_of(config, hosts, train=split == "train")
        return preference_batches(splits[split], feed, config.max_length)

    return Task(
        build=policy.build,
        pretrained=policy.pretrained,
        trained=policy.trained,
        loss=loss,
        evaluate=lambda model, batch: reward_loss(model, batch, centre=config.centre),
        batches=stream,
        steps_per_epoch=len(splits["train"]) / config.batch_size,
        unit="pairs",
        notes=(policy.text, *described(splits)),
    )
