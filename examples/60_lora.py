"""Adapters on a model: attach, train a few steps, switch off, merge, and save for PEFT."""

import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from fornax import adapters
from fornax.models import DecoderConfig, create_decoder

config = DecoderConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    initializer_range=0.2,
    tie_embeddings=False,
    family="llama",
)
model = create_decoder(config, seed=0)
tokens = jnp.asarray(np.random.default_rng(0).integers(0, 64, (4, 16)))

paths = adapters.attach(model, adapters.LoRA(rank=4), rngs=nnx.Rngs(0))
print("adapters on", ", ".join(paths))

# Only the adapters are arguments of the gradient and known to the optimizer.
graphdef, lora, base = nnx.split(model, adapters.LoRAParam, ...)
optimizer = optax.adam(1e-2)
moments = optimizer.init(lora)


@jax.jit
def step(lora, moments):
    def loss(lora):
        logits = nnx.merge(graphdef, lora, base)(tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    value, gradient = jax.value_and_grad(loss)(lora)
    updates, moments = optimizer.update(gradient, moments)
    return optax.apply_updates(lora, updates), moments, value


for number in range(30):
    lora, moments, value = step(lora, moments)
    if number % 10 == 0:
        print(f"step {number}: loss {value:.3f}")
print(f"last: loss {value:.3f}")

model = nnx.merge(graphdef, lora, base)
with adapters.disabled(model):
    reference = model(tokens)
tuned, merged = model(tokens), adapters.merged(model)(tokens)
print(f"from the base {jnp.abs(tuned - reference).max():.2f}, ", end="")
print(f"from the merged weights {jnp.abs(tuned - merged).max():.1e}")

with tempfile.TemporaryDirectory() as folder:
    adapters.save_peft(model, Path(folder) / "adapter", base="models/base")
    again = create_decoder(config, seed=0)
    adapters.load_peft(Path(folder) / "adapter", again)
    print(f"saved and loaded: {jnp.abs(again(tokens) - tuned).max():.1e}")
