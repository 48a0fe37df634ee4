"""Make a module of your own 8- and 4-bit, by rules; what is left over is listed.

python examples/69_quantize_module.py
"""

import jax
import jax.numpy as jnp
from flax import nnx

from fornax.quant import QuantizationRule, quantize


class Classifier(nnx.Module):
    """Convolutions, a product of its own and a head."""

    def __init__(self, rngs):
        self.first = nnx.Conv(3, 32, (3, 3), rngs=rngs)
        self.second = nnx.Conv(32, 64, (3, 3), strides=2, rngs=rngs)
        self.mix = nnx.Param(jax.random.normal(rngs.params(), (64, 256)) / 8)
        self.head = nnx.Linear(256, 10, rngs=rngs)

    def __call__(self, x_BHWC):
        x_BHWC = nnx.relu(self.second(nnx.relu(self.first(x_BHWC))))
        return self.head(nnx.relu(x_BHWC.mean((1, 2)) @ self.mix))


images = jax.random.normal(jax.random.key(0), (16, 32, 32, 3))
model = Classifier(nnx.Rngs(0))
wanted = model(images)

# The whole path of a module must match. The inputs show what `mix` is multiplied with, and along
# which axis. The head's inputs are rounded as they come: a product of integers.
report = quantize(
    model,
    [
        QuantizationRule(module_path="first|second", weight_qtype="int8"),
        QuantizationRule(module_path="", weight_qtype="int4", tile_size=32),
        QuantizationRule(module_path="head", weight_qtype="int8", act_qtype="int8"),
    ],
    images,
)
for path, how in report.quantized.items():
    print(f"{path}: {how}")
for path, reason in report.kept.items():
    print(f"{path} stays: {reason}")
error = jnp.linalg.norm(model(images) - wanted) / jnp.linalg.norm(wanted)
print(f"{report.bytes_after / report.bytes_before:.0%} of the bytes, outputs {error:.1%} off")
assert error < 0.2
