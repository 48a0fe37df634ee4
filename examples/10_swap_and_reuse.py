"""Swap a part of a decoder for your own module, and start a model from another one's weights.

python examples/10_swap_and_reuse.py
"""

import dataclasses
import tempfile

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from fornax.config.errors import ConfigError
from fornax.models import (
    Decoder,
    DecoderConfig,
    create_decoder,
    load_pretrained,
    save_pretrained,
    stack_layers,
)

config = DecoderConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_layers=4, num_heads=4, num_kv_heads=2
)
folder = tempfile.TemporaryDirectory()
save_pretrained(create_decoder(config), f"{folder.name}/small")  # stands for any Hugging Face one
tokens = jax.random.randint(jax.random.key(0), (4, 16), 0, config.vocab_size)

# 1. Swap. All layers are one module whose parameters have a leading "layers" axis, so the
# replacement is written for one layer and stacked.


class SquaredReluMLP(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        draw = nnx.initializers.normal(0.02)
        up, down = (config.hidden_size, 128), (128, config.hidden_size)
        self.up = nnx.Param(draw(rngs.params(), up), axes=("embed", "mlp"))
        self.down = nnx.Param(draw(rngs.params(), down), axes=("mlp", "embed"))

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        h_BTF = jnp.square(jax.nn.relu(jnp.einsum("BTD,DF->BTF", x_BTD, self.up[...])))
        return jnp.einsum("BTF,FD->BTD", h_BTF, self.down[...])


model = load_pretrained(f"{folder.name}/small")
model.layers.mlp = stack_layers(SquaredReluMLP, config.num_layers, nnx.Rngs(1))
print("swapped: mlp/up is now", model.layers.mlp.up.shape)

# Train only what is new: its variables are the ones to differentiate.
graphdef, new, kept = nnx.split(model, lambda path, _: "mlp" in path, ...)
optimizer = optax.adam(1e-2)
optimizer_state = optimizer.init(new)


@jax.jit
def step(new, kept, optimizer_state):
    def loss(new):
        logits_BTV = nnx.merge(graphdef, new, kept)(tokens[:, :-1])
        labels = tokens[:, 1:]
        return optax.softmax_cross_entropy_with_integer_labels(logits_BTV, labels).mean()

    value, gradients = jax.value_and_grad(loss)(new)
    updates, optimizer_state = optimizer.update(gradients, optimizer_state)
    return optax.apply_updates(new, updates), optimizer_state, value


losses = []
for _ in range(30):
    new, optimizer_state, value = step(new, kept, optimizer_state)
    losses.append(float(value))
print(f"training the new part alone: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
assert losses[-1] < losses[0]

try:
    save_pretrained(nnx.merge(graphdef, new, kept), f"{folder.name}/swapped")
except ConfigError as error:
    print("saving it as Llama is refused:", error)

# 2. Partial initialisation: a deeper model with a larger vocabulary starts from the small one.
small = load_pretrained(f"{folder.name}/small")
large = Decoder(dataclasses.replace(config, num_layers=6, vocab_size=80), rngs=nnx.Rngs(2))

nnx.update(large.final_norm, nnx.state(small.final_norm))  # a whole submodule


def first_rows(new_leaf, old_leaf):  # the first layers, or the first tokens; the rest stay as drawn
    return new_leaf.at[: old_leaf.shape[0]].set(old_leaf)


for part in ("layers", "embed"):
    ours, theirs = getattr(large, part), getattr(small, part)
    nnx.update(ours, jax.tree.map(first_rows, nnx.state(ours), nnx.state(theirs)))

same = jnp.array_equal(large.layers.mlp.up.kernel[:4], small.layers.mlp.up.kernel[...])
print("first four of six layers come from the small model:", bool(same))
assert same
assert large(tokens).shape == (4, 16, 80)
folder.cleanup()
