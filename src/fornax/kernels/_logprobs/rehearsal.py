"""Made-up calls for log-probabilities, for measuring implementations against each other.

Legend: T tokens, D model width, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fornax.kernels._logprobs.call import LogprobsCall, LogprobsInputs, TokenLogprobs
from fornax.kernels._vocabulary import rehearse_products

__all__ = ["rehearse"]


def rehearse(
    call: LogprobsCall, run: Callable[[LogprobsInputs], TokenLogprobs]
) -> Callable[[], Any]:
    """Return a function that computes the values and gradients of one call like `call`."""

    def loss(x_TD: jax.Array, w_DV: jax.Array, targets_T: jax.Array) -> jax.Array:
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

    return rehearse_products(call, loss)
