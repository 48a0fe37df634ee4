"""Training of one parameter by a config, for comparisons with a paper's algorithm."""

import jax
import numpy as np

from fornax.optim import build


def run(config, start, axes, grads):
    """The parameter `w` after an update by each of the gradients, and the optimizer's state."""
    built = build(config, total_steps=len(grads), params={"w": start}, axes={"w": axes})
    params = {"w": jax.numpy.asarray(start)}
    state = built.init(params)
    step = jax.jit(built.update)
    for grad in grads:
        params, state = step({"w": grad}, state, params)
    return np.asarray(params["w"]), state
