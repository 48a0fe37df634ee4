"""The log-probability of whole completions, by the one log-prob function of the models.

Legend: N sequences, T tokens of a row, K kept positions of a row.

Prompts need no logits: with `keep` [N, K], the positions whose next token belongs to the
completion, only those go through the vocabulary projection, the dearest product of a small model.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fornax.models import Decoder, Remat, token_logprobs
from fornax.tune.losses import average

__all__ = ["Completions", "completion_logprobs", "keep_positions", "kept_room"]


class Completions(NamedTuple):
    """What a model thinks of completions; the leading dimensions are those of the batch."""

    logps: jax.Array
    """float32: the sum of log-probs over the completion's tokens, its EOS included."""
    lengths: jax.Array
    """float32: tokens of the completion."""

    @property
    def averages(self) -> jax.Array:
        """Log-prob per token; 0 for an empty completion."""
        return average(self.logps, self.lengths)


def completion_logprobs(
    model: Decoder, batch: Mapping[str, Any], *, remat: str | Remat = "none"
) -> Completions:
    """Sums of log-probs of completions, and their lengths.

    Args:
      model: a decoder, with adapters or without.
      batch: tokens, targets, segment_ids, positions int32 [..., T], loss_weights float32 [..., T]
        (above 0 where the target is the completion's); optionally keep int32 [..., K], from
        `keep_positions`.
      remat: what the backward pass computes again.

    Returns:
      Sums and lengths of shape [...].
    """
    shape = batch["tokens"].shape[:-1]

    def flat(name: str) -> jax.Array:
        return batch[name].reshape(-1, batch[name].shape[-1])

    weights_NT = flat("loss_weights")
    found = token_logprobs(
        model,
        flat("tokens"),
        jnp.where(weights_NT > 0, flat("targets"), -1),  # a negative target counts 0
        positions_BT=flat("positions"),
        segment_ids_BT=flat("segment_ids"),
        keep_BK=flat("keep") if "keep" in batch else None,
        remat=remat,
    )
    return Completions(
        logps=jnp.sum(found.logprobs, axis=-1).reshape(shape),
        lengths=jnp.sum(weights_NT > 0, axis=-1).astype(jnp.float32).reshape(shape),
    )


def kept_room(longest: int, length: int) -> int:
    """How many positions to keep in rows of `length` whose completions are `longest` at most: an
    eighth of the row, or the next multiple of it, so that few shapes are compiled."""
    step = max(1, length // 8)
    return min(length, -(-max(longest, 1) // step) * step)


def keep_positions(loss_weights: np.ndarray, room: int) -> np.ndarray:
    """Where a row's weights are above 0, in order, then other positions to fill `room`.

    Args:
      loss_weights: float32 [..., T], at most `room` of a row above 0.
      room: K.

    Returns:
      int32 [..., K].
    """
    order = np.argsort(loss_weights <= 0, axis=-1, kind="stable")
    return np.ascontiguousarray(order[..., :room], dtype=np.int32)
