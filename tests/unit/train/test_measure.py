"""A loss that depends on a mean over the whole batch is the same however the batch is divided.

Legend: B rows, I inputs.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fornax.optim import SGD, Constant, OptimConfig
from fornax.train.config import TrainerConfig
from fornax.train.goodput import Ledger
from fornax.train.session import first_state, prepare
from fornax.train.task import Loss, PostTraining, Task

B, I = 8, 3  # noqa: E741
RNG = np.random.default_rng(0)
ROWS = {
    "x": RNG.normal(size=(B, I)).astype(np.float32),
    "weight": RNG.exponential(size=B).astype(np.float32) ** 3,
}


class Weights(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.w = nnx.Param(jax.random.normal(rngs.params(), (I,)), axes=(None,))


def outputs(model: Any, batch: Any) -> jax.Array:
    return jnp.tanh(batch["x"] @ model.w[...])


def measure(model: Any, batch: Any) -> dict[str, tuple[jax.Array, jax.Array]]:
    weight = batch["weight"]
    return {"centre": (jnp.sum(weight * outputs(model, batch)), jnp.sum(weight))}


def loss(model: Any, batch: Any, key: jax.Array) -> Loss:
    del key
    spread = (outputs(model, batch) - 1 - batch["measured/centre"]) ** 2
    total, weight = jnp.sum(batch["weight"] * spread), jnp.sum(batch["weight"])
    return Loss(total=total, weight=weight, metrics={})


def no_batches(split: str, hosts: Any) -> Any:
    raise AssertionError("not read here")


TASK = Task(
    build=Weights, loss=loss, post=PostTraining(measure=measure), batches=no_batches, unit="rows"
)


def oracle(w: np.ndarray) -> tuple[float, np.ndarray]:
    """Loss and gradient in float64; the centre is not a function of the weights."""
    x, weight = (ROWS[name].astype(np.float64) for name in ("x", "weight"))
    share = weight / weight.sum()
    y = np.tanh(x @ w)
    away = y - 1 - share @ y
    return float(share @ away**2), (2 * share * away * (1 - y**2)) @ x


@pytest.mark.parametrize("accumulate", [1, 2, 4])
def test_a_measured_mean_is_of_the_whole_batch_and_has_no_gradient(accumulate: int):
    optim = OptimConfig(
        optimizer=SGD(momentum=None), learning_rate=0.1, schedule=Constant(), clip=()
    )
    config = TrainerConfig(batch_size=B, accumulate=accumulate, optim=optim)
    programs = prepare(config, TASK, Ledger(), jax.devices()[:1])
    state = first_state(config, programs)
    before = np.asarray(state.params["w"], np.float64)
    value, gradient = oracle(before)
    sums = programs.evaluate(state, ROWS)
    assert float(sums.total / sums.weight) == pytest.approx(value, rel=1e-5)
    state, metrics = programs.step(state, ROWS)
    assert float(metrics["loss"]) == pytest.approx(value, rel=1e-5)
    np.testing.assert_allclose(state.params["w"], before - 0.1 * gradient, rtol=1e-5, atol=1e-6)
