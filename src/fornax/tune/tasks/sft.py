"""Supervised fine-tuning: the next token of what the assistant wrote.

Legend: B rows, T tokens of a row, D model width.
"""

import functools
import math
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp

from fornax.models import Decoder
from fornax.train import Batch, Hosts, Loss, PostTraining, Task, next_token_loss
from fornax.tune.config import SFTConfig
from fornax.tune.data import PackedStream, RowStream, load_examples, sft_batches
from fornax.tune.policy import Origin, policy
from fornax.tune.splits import described, load_splits, loader_options

__all__ = ["make", "neftune", "sft_loss"]


def make(config: SFTConfig, origin: Origin, out: Path) -> Task:
    """The task of `fornax tune sft`; reads and checks the data.

    Args:
      config: the run.
      origin: the model to start from.
      out: the run directory; nothing is written there.

    Raises:
      ConfigError: when adapters match no module.
      DataError: naming file and line of what cannot be trained on.
    """
    del out
    trained = policy(config, origin)
    load = functools.partial(load_examples, full=config.loss_on == "all")
    splits = load_splits(config, origin, load)

    def stream(split: str, hosts: Hosts) -> PackedStream | RowStream:
        options = loader_options(config, hosts, train=split == "train")
        return sft_batches(splits[split], options, config.max_length, packing=config.packing)

    # Packed passes run into each other: several take fewer batches than as many single ones.
    epochs = config.epochs or 1.0
    steps = stream("train", Hosts()).batches_in(epochs)
    return Task(
        build=trained.build,
        loss=functools.partial(sft_loss, config=config),
        evaluate=lambda decoder, batch: next_token_loss(
            decoder,
            batch,
            balance=False,
            mtp_weight=None if config.mtp_weight is None else 0.0,
        ),
        batches=stream,
        summarise=_summarise,
        pretrained=trained.pretrained,
        unit="trained_tokens",
        post=PostTraining(
            trained=trained.trained,
            steps_per_epoch=steps / epochs,
            notes=(trained.text, *described(splits)),
        ),
    )


def sft_loss(decoder: Decoder, batch: Batch, key: jax.Array, *, config: SFTConfig) -> Loss:
    """`next_token_loss` of `sft_batches`, with the options of `config`; `key` draws the noise."""
    disturb = None
    if config.neftune_alpha is not None:
        disturb = neftune(config.neftune_alpha, batch["segment_ids"], key)
    return next_token_loss(
        decoder,
        batch,
        remat=config.resolved_remat(),
        z_loss=config.z_loss,
        disturb=disturb,
        balance=False,
        mtp_weight=config.mtp_weight,
    )


def _summarise(means: dict[str, float]) -> dict[str, float]:
    return {**means, "perplexity": math.exp(min(means["loss"], 700.0))}


def neftune(
    alpha: float, segment_ids_BT: jax.Array, key: jax.Array
) -> Callable[[jax.Array], jax.Array]:
    """Noise for embeddings: uniform in +-alpha / sqrt(L D), L the tokens of the example.

    Jain et al. 2023 (arXiv:2310.05914). Several examples in a row have each its own L; padding
    gets no noise.

    Args:
      alpha: strength; 5 to 15 in the paper.
      segment_ids_BT: int32 example of each token, 0 for padding.
      key: random key.

    Returns:
      A function of embeddings [B, T, D].

    Example:
      >>> decoder.hidden(tokens_BT, disturb=neftune(5.0, segment_ids_BT, key))
    """
    lengths_BT = _lengths(segment_ids_BT).astype(jnp.float32)
    scale_BT = jnp.where(segment_ids_BT > 0, alpha * jax.lax.rsqrt(lengths_BT), 0.0)

    def disturb(x_BTD: jax.Array) -> jax.Array:
        noise_BTD = jax.random.uniform(key, x_BTD.shape, jnp.float32, -1.0, 1.0)
        width = math.sqrt(x_BTD.shape[-1])
        return x_BTD + (noise_BTD * (scale_BT[..., None] / width)).astype(x_BTD.dtype)

    return disturb


def _lengths(segment_ids_BT: jax.Array) -> jax.Array:
    """int32 tokens of the run of equal segments that each token lies in."""
    rows, width = segment_ids_BT.shape
    index_BT = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (rows, width))
    edge_B1 = jnp.ones((rows, 1), bool)
    changes_BT = segment_ids_BT[:, 1:] != segment_ids_BT[:, :-1]
    first_BT = jnp.where(jnp.concatenate([edge_B1, changes_BT], axis=1), index_BT, 0)
    last_BT = jnp.where(jnp.concatenate([changes_BT, edge_B1], axis=1), index_BT, width)
    start_BT = jax.lax.cummax(first_BT, axis=1)
    end_BT = jax.lax.cummin(last_BT, axis=1, reverse=True)
    return end_BT - start_BT + 1
