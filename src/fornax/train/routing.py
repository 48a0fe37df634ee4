"""What training a mixture of experts adds to a loss, and to a step's metrics.

Legend: L layers with experts, those of modules that predict further tokens last; E experts.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp

from fornax.models import Decoder, Routing, router_losses
from fornax.models.routing import balanced_bias
from fornax.train.task import Loss

__all__ = ["settle_routing", "with_routing"]

_TOKENS = "expert_tokens"


def with_routing(
    loss: Loss, decoder: Decoder, routing: Routing | None, *, balance: bool = True
) -> Loss:
    """The loss with its routers' losses, as the config weighs them, and what they did.

    Over several micro-batches each has the balance loss of its own tokens.

    Args:
      loss: of a batch.
      decoder: the model.
      routing: from `Decoder.hidden_and_routing`; None leaves the loss as it is.
      balance: whether the losses are part of `total`, or metrics only.

    Returns:
      The loss with the metrics `balance_loss` and `router_z_loss` (both unweighted),
      `router_entropy` in nats, and of the tokens that an expert was chosen for over the mean of its
      layer, the largest and the smallest over layers and experts: `expert_load_max` and
      `expert_load_min`. Its count `expert_tokens` [L, E] says how many tokens each was chosen for.
      Where experts have a capacity the metric `expert_dropped` is the share of those that were
      dropped, and the count `expert_tokens_dropped` [L, E] how many they were.
    """
    experts = decoder.config.experts
    if experts is None or routing is None:
        return loss
    found = router_losses(routing)
    extra = experts.balance_loss * found["balance"] + experts.router_z_loss * found["router_z"]
    mean_L1 = jnp.mean(routing.assigned_E, axis=-1, keepdims=True)
    load_LE = jax.lax.stop_gradient(routing.assigned_E / jnp.maximum(mean_L1, 1))
    weight = loss.weight
    metrics = {
        "balance_loss": (jax.lax.stop_gradient(found["balance"]) * weight, weight),
        "router_z_loss": (jax.lax.stop_gradient(found["router_z"]) * weight, weight),
        "router_entropy": (jnp.sum(routing.entropy), jnp.sum(routing.tokens)),
        "expert_load_min": (jnp.min(load_LE) * weight, weight),
    }
    counts = {_TOKENS: jax.lax.stop_gradient(routing.assigned_E)}
    if routing.dropped_E is not None:
        dropped_LE = jax.lax.stop_gradient(routing.dropped_E)
        metrics["expert_dropped"] = (jnp.sum(dropped_LE), jnp.sum(counts[_TOKENS]))
        counts["expert_tokens_dropped"] = dropped_LE
    return replace(
        loss,
        total=loss.total + extra * weight if balance else loss.total,
        metrics={**loss.metrics, **metrics},
        maxima={**loss.maxima, "expert_load_max": jnp.max(load_LE)},
        counts={**loss.counts, **counts},
    )


def settle_routing(decoder: Decoder, loss: Loss) -> None:
    """After a step, move the biases for the choice of experts towards an even load: of the layers,
    and of modules that predict further tokens, in this order."""
    config, assigned_LE = decoder.config.experts, loss.counts.get(_TOKENS)
    if config is None or assigned_LE is None:
        return
    first = 0
    for layers in [decoder.layers] + ([] if decoder.mtp is None else [decoder.mtp.layer]):
        if layers.experts is None or layers.experts.selection_bias is None:
            continue
        bias = layers.experts.selection_bias
        own_LE = assigned_LE[first : first + bias.shape[0]]
        bias.set_value(balanced_bias(bias.get_value(), own_LE, config.bias_update_rate))
        first += bias.shape[0]
