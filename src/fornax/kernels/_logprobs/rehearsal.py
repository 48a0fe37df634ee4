"""Made-up calls for log-probabilities, for measuring implementations against each other.

Legend: T tokens, D model width, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fornax.kernels._logprobs.call import LogprobsCall, LogprobsInputs, TokenLogprobs

__all__ = ["rehearse"]


def rehearse(
    call: LogprobsCall, run: Callable[[LogprobsInputs], TokenLogprobs]
) -> Callable[[], Any]:
    """Return a function that computes the values and gradients of one call like `call`."""
    rng = np.random.default_rng(0)
    x_TD = jnp.asarray(rng.normal(size=(call.tokens, call.width)), call.dtype)
    w_DV = jnp.asarray(rng.normal(size=(call.width, call.vocabulary)), call.dtype)
    targets_T = jnp.asarray(rng.integers(0, call.vocabulary, call.tokens), jnp.int32)

    def loss(x_TD: jax.Array, w_DV: jax.Array) -> jax.Array:
        inputs = LogprobsInputs(
            x_TD=x_TD,
            w_DV=w_DV,
            targets_T=targets_T,
            temperature_T=jnp.ones(call.tokens),
            softcap=call.softcap,
            entropy=call.entropy,
            chunk=call.chunk,
        )
        found = run(inputs)
        return jnp.sum(found.logprobs) + (0 if found.entropy is None else jnp.sum(found.entropy))

    step = jax.jit(jax.value_and_grad(loss, (0, 1)))
    return lambda: step(x_TD, w_DV)
