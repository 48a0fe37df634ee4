"""The log-probability of whole completions, by the one log-prob function of the models.

Legend: N sequences, T tokens of a row, K kept positions of a row, D model width.

Prompts need no logits: with `keep` [N, K], the positions whose next token belongs to the
completion, only those go through the vocabulary projection, the dearest product of a small model.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fornax.kernels import linear_logprobs
from fornax.models import Decoder, Remat

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
        return self.logps / jnp.maximum(self.lengths, 1)


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

    x_NTD = model.hidden(
        flat("tokens"), flat("positions"), flat("segment_ids"), consecutive=True, remat=remat
    )
    targets_NK, weights_NK = flat("targets"), flat("loss_weights")
    lengths_N = jnp.sum(weights_NK > 0, axis=-1)
    if "keep" in batch:
        keep_NK = flat("keep")
        kept = jnp.arange(keep_NK.shape[-1]) < lengths_N[:, None]
        x_NTD = jnp.take_along_axis(x_NTD, keep_NK[..., None], axis=1)
        targets_NK = jnp.take_along_axis(targets_NK, keep_NK, axis=1)
    else:
        kept = weights_NK > 0
    found = linear_logprobs(
        x_NTD,
        model.output_weights().astype(x_NTD.dtype),
        jnp.where(kept, targets_NK, -1),
        softcap=model.config.final_logit_softcap,
    )
    return Completions(
        logps=jnp.sum(found.logprobs, axis=-1).reshape(shape),
        lengths=lengths_N.astype(jnp.float32).reshape(shape),
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
