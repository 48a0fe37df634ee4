"""Train a small flow model on letters and sample from it: plain JAX, and Fornax's parts.

The network is two functions below. The data set, the objective, the average of the parameters, the
sampler, guidance and the judge are `fornax.diffusion`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fornax import diffusion
from fornax.diffusion.letters import LETTERS, Judge, Letters

STEPS, BATCH, WIDTH, NAMES = 500, 64, 512, "AHOTX"
EMPTY = len(NAMES)  # the class that stands for no condition

# 1,500 letters, and an eleventh of their conditions dropped in training, for guidance.
letters = Letters()
examples = [e for e in (letters[i] for i in range(8000)) if LETTERS[e.letter] in NAMES]
images = np.stack([example.image for example in examples])
classes = np.array([NAMES.index(LETTERS[example.letter]) for example in examples])


def init(key: jax.Array) -> dict[str, jax.Array]:
    """Parameters of a perceptron with three residual layers."""
    keys = jax.random.split(key, 6)
    pixels = images[0].size
    params = {
        "read": jax.random.normal(keys[0], (pixels, WIDTH)) * pixels**-0.5,
        "classes": jax.random.normal(keys[1], (EMPTY + 1, WIDTH)),
        "write": jnp.zeros((WIDTH, pixels)),
    }
    for i in range(3):
        params[f"layer{i}"] = jax.random.normal(keys[2 + i], (WIDTH, WIDTH)) * WIDTH**-0.5
    return params


def network(params, x_BHWC, point, classes_B):
    """The image that the network claims under x, at a point, of a class."""
    waves = jnp.arange(WIDTH) * 0.02 * jnp.reshape(point.t / 100, (-1, 1))
    h_BF = x_BHWC.reshape(len(x_BHWC), -1) @ params["read"] + params["classes"][classes_B]
    h_BF = h_BF + jnp.cos(waves)
    for i in range(3):
        h_BF = h_BF + jax.nn.gelu(h_BF / jnp.std(h_BF, 1, keepdims=True)) @ params[f"layer{i}"]
    return (h_BF @ params["write"]).reshape(x_BHWC.shape)


objective = diffusion.Objective(prediction="data", weight="constant")
optimizer = optax.chain(
    optax.adam(optax.cosine_decay_schedule(1e-3, STEPS)),
    diffusion.average_with(diffusion.warmed_up(0.98)),
)


@jax.jit
def train(params, state, step, data, classes, ids):
    """One step on a batch; noise and times go with the examples' ids."""
    noise = diffusion.example_noise(0, step, ids, data.shape[1:])
    point = objective.point(diffusion.example_uniform(0, step, ids))

    def loss(params):
        output = network(params, objective.noised(data, noise, point), point, classes)
        return objective.losses(output, data, noise, point).mean()

    value, gradient = jax.value_and_grad(loss)(params)
    updates, state = optimizer.update(gradient, state, params)
    return optax.apply_updates(params, updates), state, value


params = init(jax.random.key(0))
state = optimizer.init(params)
random = np.random.default_rng(0)
for step in range(STEPS):
    ids = random.integers(len(examples), size=BATCH)
    kept = np.where(random.random(BATCH) < 0.1, EMPTY, classes[ids])
    batch = (images[ids], kept, ids.astype(np.int32))
    params, state, value = train(params, state, step, *batch)
    if step % 100 == 99:
        print(f"step {step + 1}: loss {float(value):.4f}")

# 100 letters in eight steps of the second-order solver, under guidance.
average = state[1].averages[0]
wanted = jnp.arange(100) % len(NAMES)
schedule = diffusion.flow(8)
drawn = diffusion.sample(
    diffusion.guided(
        lambda x, point, classes: network(average, x, point, classes),
        wanted,
        jnp.full_like(wanted, EMPTY),
        2.0,
    ),
    diffusion.noised(schedule, jax.random.normal(jax.random.key(1), (100, *letters.shape))),
    diffusion.SAMPLERS["dpm++2m"](schedule),
    prediction="data",
)
found = Judge(letters).judge(np.asarray(drawn))
read = [LETTERS[letter] if letter >= 0 else "-" for letter in found.letter]
right = np.mean([name == NAMES[int(c)] for name, c in zip(read, wanted, strict=True)])
print(f"asked for {NAMES * 4}, the judge read {''.join(read[:20])}: {right:.0%} right of 100")
for row in np.asarray(drawn)[2, ::2, :, 0]:  # an O
    print("".join(" .:*#"[int(np.clip(pixel * 2 + 2.5, 0, 4))] for pixel in row))
assert right > 0.6
