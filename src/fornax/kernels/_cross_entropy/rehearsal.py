"""Made-up cross-entropy calls, for measuring implementations against each other.

Legend: T tokens, D model width, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fornax.kernels._cross_entropy.call import CrossEntropyCall, CrossEntropyInputs, LossSums
from fornax.kernels._vocabulary import rehearse_products

__all__ = ["rehearse"]


def rehearse(
    call: CrossEntropyCall, run: Callable[[CrossEntropyInputs], LossSums]
) -> Callable[[], Any]:
    """Return a function that computes the sums and gradients of one call like `call`."""

    def loss(x_TD: jax.Array, w_DV: jax.Array, targets_T: jax.Array) -> jax.Array:
        inputs = CrossEntropyInputs(
            x_TD=x_TD,
            w_DV=w_DV,
            targets_T=targets_T,
            weights_T=jnp.ones(call.tokens),
            z_loss=1e-4 if call.z_loss else 0.0,
            softcap=call.softcap,
            chunk=call.chunk,
        )
        return run(inputs).loss_sum

    return rehearse_products(call, loss)
