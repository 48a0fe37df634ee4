"""Linear cross-entropy as the formula reads, logits whole: what the others are tested against.

Legend: T tokens, D model width, V vocabulary.
"""

import jax
import jax.numpy as jnp

from fornax.kernels._cross_entropy.call import CrossEntropyInputs, LossSums

__all__ = ["reference"]


def reference(inputs: CrossEntropyInputs) -> LossSums:
    """Compute the sums from whole logits [T, V], in float64 for float64 inputs, else float32."""
    dtype = jnp.promote_types(inputs.x_TD.dtype, jnp.float32)
    weights_T = inputs.weights_T.astype(dtype).reshape(-1)
    x_TD = inputs.x_TD.reshape(-1, inputs.x_TD.shape[-1])
    logits_TV = jnp.dot(x_TD.astype(dtype), inputs.w_DV.astype(dtype), precision="highest")
    if inputs.softcap is not None:
        logits_TV = inputs.softcap * jnp.tanh(logits_TV / inputs.softcap)
    lse_T = jax.nn.logsumexp(logits_TV, axis=-1)
    hit_TV = jax.nn.one_hot(inputs.targets_T.reshape(-1), logits_TV.shape[1], dtype=bool)
    target_T = jnp.sum(jnp.where(hit_TV, logits_TV, 0), axis=-1)
    counted_T = weights_T != 0
    z_T = inputs.z_loss * lse_T**2
    loss_T = jnp.where(counted_T, weights_T * (lse_T - target_T + z_T), 0)
    z_loss_T = jnp.where(counted_T, weights_T * z_T, 0)
    correct_T = jnp.any(hit_TV & (logits_TV == logits_TV.max(-1, keepdims=True)), axis=-1)
    return LossSums(
        loss_sum=jnp.sum(loss_T),
        weight_sum=jnp.sum(weights_T),
        z_loss_sum=jax.lax.stop_gradient(jnp.sum(z_loss_T)),
        correct_sum=jax.lax.stop_gradient(jnp.sum(weights_T * correct_T)),
    )
