"""Per-group optimization from config: Muon for the matrices, a slow rate here, a freeze there.

python examples/30_optimizer_groups.py
"""

import jax
import jax.numpy as jnp

from fornax.config import from_mapping
from fornax.optim import OptimConfig, build

CONFIG = {
    "optimizer": {"type": "muon", "weight_decay": 0.0},
    "learning_rate": 0.02,
    "schedule": {"type": "wsd", "warmup_steps": 10, "decay_steps": 40},
    "clip": [{"type": "global_norm", "max_norm": 1.0}],
    "groups": [
        {"pattern": "^embed$", "freeze": True},
        {"pattern": "/down$", "learning_rate_factor": 0.5},
    ],
    "ema": {"decay": 0.9},
}
STEPS = 120

keys = jax.random.split(jax.random.key(0), 5)
params = {
    "embed": jax.random.normal(keys[0], (32, 16)),
    "layers": {
        "up": 0.2 * jax.random.normal(keys[1], (2, 16, 32)),
        "down": 0.2 * jax.random.normal(keys[2], (2, 32, 16)),
        "scale": jnp.ones((2, 16)),
    },
}
axes = {
    "embed": ("vocab", "embed"),
    "layers": {
        "up": ("layers", "embed", "mlp"),
        "down": ("layers", "mlp", "embed"),
        "scale": ("layers", "norm"),
    },
}
target = jax.random.normal(keys[3], (32, 16))


def loss_of(params):
    x = params["embed"]
    for layer in range(2):
        up, down, scale = (params["layers"][name][layer] for name in ("up", "down", "scale"))
        x = x + jnp.tanh((x * scale) @ up) @ down
    return jnp.mean((x - target) ** 2)


config = from_mapping(OptimConfig, CONFIG)
chain = build(config, total_steps=STEPS, params=params, axes=axes)
for path, assignment in chain.assignments.items():
    view = chain.views[path]
    shape = "x".join(map(str, view.core_shape))
    what = assignment.optimizer.type if assignment.optimizer else "frozen"
    rate = assignment.learning_rate_factor
    print(f"{path:12s} {shape:>6s} stacked {view.batch_shape}: {what}, rate x{rate}")


@jax.jit
def step(params, state):
    loss, grads = jax.value_and_grad(loss_of)(params)
    params, state = chain.update(grads, state, params)
    return params, state, loss


before, state = params, chain.init(params)
for number in range(STEPS):
    params, state, loss = step(params, state)
    if number % 30 == 0 or number == STEPS - 1:
        print(f"step {number:3d}  rate {chain.schedule(number):.4f}  loss {loss:.4f}")

averaged = chain.eval_params(params, state)
print(f"loss of the averaged parameters {loss_of(averaged):.4f}")
assert (params["embed"] == before["embed"]).all(), "frozen parameters moved"
assert loss_of(params) < 0.5 * loss_of(before), "nothing was learned"
