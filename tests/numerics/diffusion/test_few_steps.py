"""Distillation makes samples of few steps better: a small network on points around eight centres.

The network predicts data, on a flow, and consistency is over 40 levels: a student whose target is
its own claim alone diverges there.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fornax.diffusion.distill import (
    consistency_losses,
    solver_levels,
)
from fornax.diffusion.objectives import Objective
from fornax.diffusion.samplers import lcm
from fornax.diffusion.sampling import sample

OBJECTIVE = Objective(prediction="data", density="uniform")
ANGLES = 2 * np.pi * np.arange(8) / 8
CENTRES = np.stack([np.cos(ANGLES), np.sin(ANGLES)], 1).astype(np.float32)
ROWS = 256
STEPS = (1, 2, 4)


def points(key, count):
    which, where = jax.random.split(key)
    noise = 0.05 * jax.random.normal(where, (count, 2))
    return jnp.asarray(CENTRES)[jax.random.randint(which, (count,), 0, 8)] + noise


def fresh(key):
    sizes = (10, 96, 96, 2)
    keys = jax.random.split(key, 3)
    return [
        (jax.random.normal(k, (i, o)) * np.sqrt(2 / i), jnp.zeros(o))
        for k, i, o in zip(keys, sizes, sizes[1:], strict=False)
    ]


def claim(layers):
    def call(x, point):
        sigma = jnp.broadcast_to(point.sigma, x.shape[:1])[:, None]
        waves = [f(np.pi * k * sigma) for k in (1, 2, 4) for f in (jnp.sin, jnp.cos)]
        x = jnp.concatenate([x, sigma, 1 - sigma, *waves], 1)
        for w, b in layers[:-1]:
            x = jax.nn.silu(x @ w + b)
        w, b = layers[-1]
        return x @ w + b

    return call


def denoising(call, key, data):
    noise, u = jax.random.split(key)
    noise = jax.random.normal(noise, data.shape)
    point = OBJECTIVE.point(jax.random.uniform(u, (len(data),)))
    return OBJECTIVE.losses(call(OBJECTIVE.noised(data, noise, point), point), data, noise, point)


def train(loss, start, steps, rate):
    """`loss` takes parameters and a key."""
    rates = optax.linear_schedule(rate, rate / 10, steps)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rates, b2=0.99))

    def step(carry, key):
        parameters, state = carry
        gradient = jax.grad(lambda p: jnp.mean(loss(p, key)))(parameters)
        update, state = optimizer.update(gradient, state, parameters)
        return (optax.apply_updates(parameters, update), state), None

    keys = jax.random.split(jax.random.key(1), steps)
    run = jax.jit(lambda s: jax.lax.scan(step, (s, optimizer.init(s)), keys))
    return run(start)[0][0]


def distances(layers):
    """Energy distance between samples and fresh points, for each number of steps."""

    def apart(a, b):
        return jnp.mean(jnp.sqrt(jnp.sum((a[:, None] - b) ** 2, -1) + 1e-12))

    @jax.jit
    def run(layers):
        real = points(jax.random.key(2), 1000)
        noise = jax.random.normal(jax.random.key(3), (1000, 2))
        found = []
        for steps in STEPS:
            table = lcm(OBJECTIVE.schedule(steps))
            drawn = sample(claim(layers), noise, table, jax.random.key(4), prediction="data")
            found.append(2 * apart(drawn, real) - apart(drawn, drawn) - apart(real, real))
        return jnp.stack(found)

    return np.asarray(run(layers))


@pytest.fixture(scope="module")
def teacher():
    def loss(layers, key):
        return denoising(claim(layers), key, points(jax.random.fold_in(key, 0), ROWS))

    return train(loss, fresh(jax.random.key(0)), 2000, 3e-3)


@pytest.mark.slow
def test_consistency_makes_few_steps_better(teacher):
    schedule = OBJECTIVE.schedule(40)

    def loss(layers, key):
        data, noise, u = jax.random.split(key, 3)
        levels = solver_levels(schedule, jax.random.uniform(u, (ROWS,)))
        noise = jax.random.normal(noise, (ROWS, 2))
        return consistency_losses(claim(layers), claim(teacher), points(data, ROWS), noise, levels)

    before, after = distances(teacher), distances(train(loss, teacher, 1000, 1e-3))
    assert (after < before / np.array([4, 2, 1])).all(), (before, after)
