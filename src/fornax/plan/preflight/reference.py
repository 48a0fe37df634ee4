"""The reference: the loss written down plainly, in float32, on one device, the whole batch at once.

It shares the modules of the model with the trainer and nothing else: attention is the formula's,
logits exist whole, nothing is recomputed, accumulated or sharded, and the gradient is `jax.grad`'s.

Legend: B rows, T tokens of a row, V vocabulary.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fornax.optim.tree import flatten, nest
from fornax.plan.preflight.shrink import float32
from fornax.train import TrainConfig, pretrain_task
from fornax.train.state import split_model

__all__ = ["Reference", "Result"]

Result = tuple[float, dict[str, np.ndarray]]
"""The mean loss and the gradients by path, float32."""


class Reference:
    """The reference of one config; compiled once for each shape of batch."""

    def __init__(self, config: TrainConfig):
        """Prepare; nothing is computed yet."""
        config = float32(config)
        task = pretrain_task(config)
        parts = split_model(nnx.eval_shape(lambda: task.build(nnx.Rngs(config.seed))))

        def loss(params: Any, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
            decoder = parts.merge(params, nnx.to_pure_dict(parts.other), jax.random.key(0))
            return plain_loss(decoder, batch, config.z_loss)

        self._step = jax.jit(jax.value_and_grad(loss, has_aux=True))
        self.z_loss = 0.0
        """The z-loss of the last batch, a part of its loss."""

    def __call__(self, params: Mapping[str, np.ndarray], rows: Mapping[str, np.ndarray]) -> Result:
        """The loss and the gradients of a batch.

        Args:
          params: arrays by path.
          rows: the whole batch.
        """
        device = jax.devices()[0]
        with jax.default_matmul_precision("highest"):
            arrays = jax.device_put((nest(params), dict(rows)), device)
            (loss, z_loss), grads = self._step(*arrays)
        self.z_loss = float(z_loss)
        return float(loss), {path: np.asarray(x) for path, x in flatten(grads).items()}


def plain_loss(
    decoder: Any, batch: Mapping[str, jax.Array], z_loss: float
) -> tuple[jax.Array, jax.Array]:
    """Mean cross entropy of the next token with its z-loss (Chowdhery et al. 2022, section 5), and
    the z-loss alone."""
    x_BTD = decoder.hidden(
        batch["tokens"],
        batch["positions"],
        batch["segment_ids"],
        remat="none",
        implementation="reference",
    )
    logits_BTV = decoder.logits(x_BTD)
    lse_BT = jax.nn.logsumexp(logits_BTV, axis=-1)
    target_BT = jnp.take_along_axis(logits_BTV, batch["targets"][..., None], axis=-1)[..., 0]
    weights_BT = batch["loss_weights"]
    count = jnp.sum(weights_BT)
    extra = z_loss * jnp.sum(weights_BT * lse_BT**2) / count
    return jnp.sum(weights_BT * (lse_BT - target_BT)) / count + extra, extra
