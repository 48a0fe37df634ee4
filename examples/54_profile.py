"""Where the time of any JAX program goes: capture a few steps, then ask by module, line and cause.

python examples/54_profile.py
"""

import tempfile

import jax
import jax.numpy as jnp

from fornax import profile

WIDTH, LAYERS, ROWS = 256, 4, 128


def loss(params, x):
    """A stack of layers; `named_scope` says which module an operation belongs to."""

    def layer(x, weights):
        with jax.named_scope("mlp"):
            return x + jax.nn.gelu(x @ weights["up"]) @ weights["down"], None

    with jax.named_scope("layers"):
        x, _ = jax.lax.scan(layer, x, params["layers"])
    with jax.named_scope("head"):
        return jnp.mean((x @ params["head"]) ** 2)


@jax.jit
def step(params, x):
    """Gradient descent."""
    gradients = jax.grad(loss)(params, x)
    with jax.named_scope("optimizer"):
        return jax.tree.map(lambda p, g: p - 0.01 * g, params, gradients)


keys = iter(jax.random.split(jax.random.key(0), 4))
shapes = {
    "layers": {"up": (LAYERS, WIDTH, 4 * WIDTH), "down": (LAYERS, 4 * WIDTH, WIDTH)},
    "head": (WIDTH, 32),
}
params = jax.tree.map(
    lambda shape: 0.02 * jax.random.normal(next(keys), shape),
    shapes,
    is_leaf=lambda each: isinstance(each, tuple),
)
x = jax.random.normal(next(keys), (ROWS, WIDTH))
params = jax.block_until_ready(step(params, x))  # compiled before the capture

with tempfile.TemporaryDirectory() as directory:
    with profile.capture(directory):
        for number in range(8):
            with jax.profiler.StepTraceAnnotation("train", step_num=number):
                params = jax.block_until_ready(step(params, x))
    read = profile.read(directory)

for each, causes in read.step_times():
    spent = ", ".join(
        f"{cause} {s * 1e3:.2f} ms" for cause, s in causes.seconds.items() if s > 1e-5
    )
    print(f"step {each.number}: {each.seconds * 1e3:.2f} ms: {spent}")
print("\nmodule        time      FLOP/s   of the roofline's least time")
for row in read.ops("module").rows:
    rate = f"{row.flops_rate / 1e9:8.1f} G" if row.flops else ""
    least = f"{row.times_bound:.1f} x" if row.times_bound else ""
    print(f"{row.key or '(none)':<12} {row.seconds * 1e3:7.2f} ms {rate:>10}   {least}")
memory = max(read.memory, key=lambda each: each.peak.bytes)
owners = ", ".join(f"{owner} {size / 2**20:.1f} MiB" for owner, size in memory.owners.items())
print(f"\nat the peak ({memory.peak.instruction}): {owners}")
