"""Made-up cross-entropy calls, for measuring implementations against each other.

Legend: T tokens, D model width, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fornax.kernels._cross_entropy.call import CrossEntropyCall, CrossEntropyInputs, LossSums

__all__ = ["rehearse"]


def rehearse(
    call: CrossEntropyCall, run: Callable[[CrossEntropyInputs], LossSums]
) -> Callable[[], Any]:
    """Return a function that computes the sums and gradients of one call like `call`."""
    rng = np.random.default_rng(0)
    x_TD = jnp.asarray(rng.normal(size=(call.tokens, call.width)), call.dtype)
    w_DV = jnp.asarray(rng.normal(size=(call.width, call.vocabulary)), call.dtype)
    targets_T = jnp.asarray(rng.integers(0, call.vocabulary, call.tokens), jnp.int32)

    def loss(x_TD: jax.Array, w_DV: jax.Array) -> jax.Array:
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

    step = jax.jit(jax.value_and_grad(loss, (0, 1)))
    return lambda: step(x_TD, w_DV)
