"""The one function that says how likely a model finds given tokens, for every user of it.

Legend: B batch, T tokens of a row, K tokens kept of it, D model width, V vocabulary.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fornax.kernels import linear_logprobs, logits_logprobs
from fornax.models.decoder import Decoder
from fornax.models.remat import Remat
from fornax.models.routing import Routing

__all__ = ["TokenLogprobs", "logits_logprobs", "token_logprobs"]


class TokenLogprobs(NamedTuple):
    """What a decoder finds of given tokens."""

    logprobs: jax.Array
    """float32 log-probability of each target, in nats."""
    entropy: jax.Array | None
    """float32 entropy of the choice at each, in nats; None where not asked for."""
    routing: Routing | None = None
    """What the routers did with the tokens; None without experts."""


def token_logprobs(
    decoder: Decoder,
    tokens_BT: jax.Array,
    targets_BT: jax.Array,
    *,
    positions_BT: jax.Array | None = None,
    segment_ids_BT: jax.Array | None = None,
    temperature: float | jax.Array = 1.0,
    entropy: bool = False,
    keep_BK: jax.Array | None = None,
    routed_experts_BTLk: jax.Array | None = None,
    remat: str | Remat = "none",
    chunk: int = 1024,
) -> TokenLogprobs:
    """Log-probability of each target after the tokens before it, and the entropy of its choice.

    log softmax(logits / temperature) at the target, the model's softcap applied to the logits
    first. Logits of more than `chunk` tokens never exist at once.

    Args:
      decoder: the model; gradients reach whichever of its parameters are differentiated.
      tokens_BT: int32 token ids.
      targets_BT: int32 token that follows each token, inside the same document. A negative one
        gives 0 without a gradient.
      positions_BT: int32 position in the document, counting up by one with the index inside each,
        as in packed rows. None: counted here.
      segment_ids_BT: int32 document of each token, 0 for padding (whose values mean nothing).
      temperature: the one that the tokens were sampled at, or 1; one number or one per token.
      entropy: whether to return it too.
      keep_BK: int32 indices into each row of the only tokens wanted, for instance those of a
        completion: the others never meet the vocabulary. An index may stand twice.
      routed_experts_BTLk: see `Decoder.hidden_and_routing`.
      remat: what the backward pass computes again.
      chunk: tokens per device whose logits exist at once.

    Returns:
      float32 values [B, T] (or [B, K]) in nats, differentiable.

    Raises:
      ConfigError: given experts that are not of this model.
      KernelError: a temperature that is not above 0, or shapes that do not fit together.

    Example:
      >>> found = token_logprobs(decoder, tokens_BT, targets_BT, temperature=0.7)
      >>> per_sequence_B = jnp.sum(found.logprobs * mask_BT, axis=1)
    """
    x_BTD, routing = decoder.hidden_and_routing(
        tokens_BT,
        positions_BT,
        segment_ids_BT,
        consecutive=True,
        remat=remat,
        routed_experts_BTLk=routed_experts_BTLk,
    )
    if keep_BK is not None:
        temperature = jnp.broadcast_to(jnp.asarray(temperature), targets_BT.shape)
        temperature = jnp.take_along_axis(temperature, keep_BK, axis=1)
        targets_BT = jnp.take_along_axis(targets_BT, keep_BK, axis=1)
        x_BTD = jnp.take_along_axis(x_BTD, keep_BK[:, :, None], axis=1)
    with jax.named_scope("logprobs"):
        found = linear_logprobs(
            x_BTD,
            decoder.output_weights().astype(x_BTD.dtype),
            targets_BT,
            temperature=temperature,
            softcap=decoder.config.final_logit_softcap,
            entropy=entropy,
            chunk=chunk,
        )
    return TokenLogprobs(found.logprobs, found.entropy, routing)
