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
    few_step_sample,
    matching_losses,
    solver_levels,
)
from fornax.diffusion.objectives import Objective
from fornax.diffusion.preference import draw, flow_grpo
from fornax.diffusion.samplers import ddim, lcm
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


def fresh(key, labels=0):
    sizes = (10 + labels, 96, 96, 2)
    keys = jax.random.split(key, 3)
    return [
        (jax.random.normal(k, (i, o)) * np.sqrt(2 / i), jnp.zeros(o))
        for k, i, o in zip(keys, sizes, sizes[1:], strict=False)
    ]


def claim(layers, *told):
    """Of the network, which receives arrays (B, .) beside points and their level."""

    def call(x, point):
        sigma = jnp.broadcast_to(point.sigma, x.shape[:1])[:, None]
        waves = [f(np.pi * k * sigma) for k in (1, 2, 4) for f in (jnp.sin, jnp.cos)]
        x = jnp.concatenate([x, sigma, 1 - sigma, *waves, *told], 1)
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


def train(loss, start, steps, rate, b1=0.9):
    """`loss` takes parameters, a key and the number of the step."""
    rates = optax.linear_schedule(rate, rate / 10, steps)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rates, b1, b2=0.99))

    def step(carry, drawn):
        parameters, state = carry
        gradient = jax.grad(lambda p: jnp.mean(loss(p, *drawn)))(parameters)
        update, state = optimizer.update(gradient, state, parameters)
        return (optax.apply_updates(parameters, update), state), None

    drawn = (jax.random.split(jax.random.key(1), steps), jnp.arange(steps))
    run = jax.jit(lambda s: jax.lax.scan(step, (s, optimizer.init(s)), drawn))
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
    def loss(layers, key, _):
        return denoising(claim(layers), key, points(jax.random.fold_in(key, 0), ROWS))

    return train(loss, fresh(jax.random.key(0)), 2000, 3e-3)


@pytest.mark.slow
def test_consistency_makes_few_steps_better(teacher):
    schedule = OBJECTIVE.schedule(40)

    def loss(layers, key, _):
        data, noise, u = jax.random.split(key, 3)
        levels = solver_levels(schedule, jax.random.uniform(u, (ROWS,)))
        noise = jax.random.normal(noise, (ROWS, 2))
        return consistency_losses(claim(layers), claim(teacher), points(data, ROWS), noise, levels)

    before, after = distances(teacher), distances(train(loss, teacher, 1000, 1e-3))
    assert (after < before / np.array([4, 2, 1])).all(), (before, after)


@pytest.mark.exhaustive
def test_distribution_matching_makes_few_steps_better(teacher):
    """80 steps of the student in 400 of the network of what it draws, as the trainer has them: one
    optimizer, whose update of the student is zero in between."""
    table = lcm(OBJECTIVE.schedule(4))

    def loss(networks, key, step):
        drawing, fake = networks
        start, which, fresh_, noise, u = jax.random.split(key, 5)
        student = claim(drawing)
        x, point = few_step_sample(
            student,
            jax.random.normal(start, (ROWS, 2)),
            table,
            fresh_,
            jax.random.randint(which, (ROWS,), 0, 4),
        )
        drawn = student(x, point)
        noise = jax.random.normal(noise, (ROWS, 2))
        level = OBJECTIVE.point(jax.random.uniform(u, (ROWS,)))
        frozen = claim(jax.lax.stop_gradient(fake))
        matching = matching_losses(drawn, claim(teacher), frozen, noise, level)
        drawn = jax.lax.stop_gradient(drawn)
        output = claim(fake)(OBJECTIVE.noised(drawn, noise, level), level)
        denoised = OBJECTIVE.losses(output, drawn, noise, level)
        return jnp.mean(jnp.where(step % 5 == 0, matching, 0) + denoised)

    student, _ = train(loss, (teacher, teacher), 400, 3e-4, b1=0.0)
    before, after = distances(teacher), distances(student)
    assert (after < before / np.array([2, 2, 1])).all(), (before, after)


@pytest.mark.exhaustive
def test_a_reward_rises_and_stays():
    """A network with labels, of which three in ten were wrong, learns from groups of eight to come
    near the label's centre. Where nothing held the last step, the reward rose and fell again."""
    table = ddim(OBJECTIVE.schedule(6), 0.7)

    def told(which):
        return jax.nn.one_hot(which, 8)

    def denoise(layers, key, _):
        which, wrong, other, noise, at = jax.random.split(key, 5)
        which = jax.random.randint(which, (ROWS,), 0, 8)
        data = jnp.asarray(CENTRES)[which] + 0.05 * jax.random.normal(at, (ROWS, 2))
        other = jax.random.randint(other, (ROWS,), 0, 8)
        label = jnp.where(jax.random.bernoulli(wrong, 0.3, (ROWS,)), other, which)
        return denoising(claim(layers, told(label)), noise, data)

    teacher = train(denoise, fresh(jax.random.key(0), labels=8), 2000, 3e-3)

    def drawn(layers, key, which):
        start, new = jax.random.split(key)
        noise = jax.random.normal(start, (len(which), 2))
        path = draw(claim(layers, told(which)), noise, table, new, prediction="data")
        away = jnp.linalg.norm(path.x_MBX[-1] - jnp.asarray(CENTRES)[which], axis=-1)
        return path, (away < 0.3).astype(jnp.float32)

    def loss(layers, key, _):
        prompts, key = jax.random.split(key)
        which = jnp.repeat(jax.random.randint(prompts, (8,), 0, 8), 8)
        path, reward = drawn(jax.lax.stop_gradient(layers), key, which)
        groups = reward.reshape(8, 8)
        groups = groups - groups.mean(1, keepdims=True)
        found, _ = flow_grpo(
            claim(layers, told(which)),
            claim(teacher, told(which)),
            path.x_MBX[:-1],
            path.logps_MB[:-1].T,
            (groups / (groups.std(1, keepdims=True) + 1e-4)).reshape(-1),
            table,
            prediction="data",
        )
        return found

    def reward(layers):
        return float(drawn(layers, jax.random.key(9), jnp.arange(2000) % 8)[1].mean())

    before, after = reward(teacher), reward(train(loss, teacher, 400, 1e-3))
    assert before < 0.8
    assert after > 0.95, (before, after)
