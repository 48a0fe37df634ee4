"""Log-probabilities as the formula reads, logits whole: what the others are tested against.

Legend: T tokens, D model width, V vocabulary.
"""

import jax
import jax.numpy as jnp

from fornax.kernels._logprobs.call import LogprobsInputs, TokenLogprobs

__all__ = ["from_logits", "reference"]


def reference(inputs: LogprobsInputs) -> TokenLogprobs:
    """Compute them from whole logits [T, V], in float64 for float64 inputs, else float32."""
    dtype = jnp.promote_types(inputs.x_TD.dtype, jnp.float32)
    x, w_DV = inputs.x_TD.astype(dtype), inputs.w_DV.astype(dtype)
    logits = jnp.einsum("...D,DV->...V", x, w_DV, precision="highest")
    if inputs.softcap is not None:
        logits = inputs.softcap * jnp.tanh(logits / inputs.softcap)
    temperature = jax.lax.stop_gradient(inputs.temperature_T.astype(dtype))
    return from_logits(logits, inputs.targets_T, temperature, entropy=inputs.entropy)


def from_logits(
    logits: jax.Array, targets: jax.Array, temperature: jax.Array, *, entropy: bool
) -> TokenLogprobs:
    """Log-softmax of logits [..., V] / temperature [...] at targets [...], in the logits' dtype.

    A logit of minus infinity is a word that cannot be drawn. A negative target counts as none: 0,
    with no gradient; one beyond the vocabulary gives NaN.
    """
    scaled = logits / temperature[..., None]
    logprobs = jax.nn.log_softmax(scaled, axis=-1)
    index = jnp.clip(targets, 0, logits.shape[-1] - 1)[..., None]
    chosen = jnp.take_along_axis(logprobs, index, axis=-1)[..., 0]
    chosen = jnp.where(targets >= logits.shape[-1], jnp.nan, chosen)
    chosen = jnp.where(targets < 0, 0, chosen)
    if not entropy:
        return TokenLogprobs(chosen, None)
    possible = scaled > -jnp.inf
    surprise = jnp.exp(logprobs) * jnp.where(possible, logprobs, 0)
    return TokenLogprobs(chosen, -jnp.sum(surprise, axis=-1))
