"""Give the trainer a task of your own: a model, a loss of weighted sums, batches.

Checkpoints, exact resume, evaluation, meshes and the report come with it.

python examples/21_custom_task.py

Legend: B rows, F hidden width.
"""

import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fornax.optim import AdamW, OptimConfig
from fornax.train import EvalConfig, Hosts, Loss, Task, TrainerConfig, train

ROWS = 32


class Net(nnx.Module):
    """One hidden layer. Each parameter names its logical axes; the mesh's rules do the rest."""

    def __init__(self, rngs: nnx.Rngs):
        first = jax.random.normal(rngs.params(), (1, 64))
        self.first = nnx.Param(first, axes=(None, "mlp"))
        self.bias = nnx.Param(jnp.linspace(-3, 3, 64), axes=("mlp",))
        self.second = nnx.Param(jnp.zeros((64, 1)), axes=("mlp", None))

    def __call__(self, x_B):
        h_BF = jnp.tanh(x_B[:, None] @ self.first[...] + self.bias[...])
        return (h_BF @ self.second[...])[:, 0]


def loss(model, batch, key):
    """Sums, not means: micro-batches, hosts and evaluation batches of any sizes then add up."""
    error_B = (model(batch["x"]) - batch["y"]) * batch["weight"]
    rows = jnp.sum(batch["weight"])
    largest = jnp.max(jnp.abs(error_B)) * rows
    return Loss(total=jnp.sum(error_B**2), weight=rows, metrics={"largest_error": (largest, rows)})


class Points:
    """Endless points of a sine. Its position is one number, kept as the only virtual shard."""

    def __init__(self, split: str, hosts: Hosts):
        self.seed, self.hosts = int(split == "eval"), hosts
        self.position = 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.seed and self.position == 4:
            raise StopIteration
        x = np.random.default_rng([self.seed, self.position]).uniform(-3, 3, ROWS)
        self.position += 1
        mine = self.hosts.rows(ROWS)  # then rows of weight 0, so that all hosts have as many
        fill = (0, self.hosts.size(ROWS) - len(mine))
        x = np.pad(x[mine.start : mine.stop], fill).astype(np.float32)
        weight = np.pad(np.ones(len(mine), np.float32), fill)
        return {"x": x, "y": np.sin(2 * x), "weight": weight}

    def state(self):
        return {0: {"position": self.position}} if self.hosts.index == 0 else {}

    def restore(self, state, *, allow_changes=False):
        self.position = state[0]["position"]

    def close(self):
        """Nothing is read ahead."""


task = Task(build=Net, loss=loss, batches=Points, unit="points")
config = TrainerConfig(
    steps=300,
    batch_size=ROWS,
    optim=OptimConfig(optimizer=AdamW(weight_decay=0.0), learning_rate=1e-2),
    eval=EvalConfig(every=100),
    save_every=100,
)
with tempfile.TemporaryDirectory() as root:
    result = train(config, Path(root) / "sine", task=task, progress="none")
assert result.evaluation is not None
print(f"mean squared error {result.evaluation['loss']:.4f} after {result.step} steps")
assert result.evaluation["loss"] < 0.05
