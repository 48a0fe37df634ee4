"""The task of `fornax tune reward`: score the better completion of a pair higher.

Legend: P pairs, T tokens of a row.
"""

import functools
from pathlib import Path

import jax.numpy as jnp

from fornax.models import Decoder, Remat
from fornax.train.task import Batch, Batches, Hosts, Loss, Task
from fornax.tune import losses
from fornax.tune.config import RewardModelConfig
from fornax.tune.data import load_pairs, preference_batches
from fornax.tune.policy import Origin
from fornax.tune.reward_model import scored, scores
from fornax.tune.splits import load_splits, loader_options
from fornax.tune.tasks.pairs import mean_over, pair_task

__all__ = ["make"]


def reward_loss(
    model: Decoder, batch: Batch, *, centre: float = 0.0, remat: str | Remat = "none"
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

    def stream(split: str, hosts: Hosts) -> Batches:
        options = loader_options(config, hosts, train=split == "train")
        return preference_batches(splits[split], options, config.max_length)

    return pair_task(
        config,
        policy,
        splits,
        loss=functools.partial(reward_loss, centre=config.centre),
        batches=stream,
        unit="pairs",
    )
