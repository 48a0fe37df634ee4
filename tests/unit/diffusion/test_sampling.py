"""Sampling's hooks, keys and refusals, and guidance."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fornax.config.errors import ConfigError
from fornax.diffusion import (
    SAMPLERS,
    Point,
    edm,
    flow,
    guided,
    inpaint,
    noised,
    perpendicular,
    sample,
)
from fornax.diffusion.samplers import ddim, heun, tcd, unipc
from fornax.diffusion.sampling import Row, State, advance
from fornax.diffusion.schedules import (
    Discrete,
    Schedule,
    distilled_timesteps,
    linear_betas,
    resolution_shift,
    zero_terminal_snr,
)

CHAIN = Discrete(linear_betas())
NOISE = jax.random.normal(jax.random.key(0), (4, 3, 2))


def pull(x, point):
    """A network that claims a shrunk image, of data."""
    return 0.5 * jnp.tanh(x)


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("steps", [1, 2, 5, 16])
def test_every_sampler_ends_at_a_constant_claim(name, steps):
    """If the network always claims the same data, that is where all samplers end."""
    schedule = CHAIN.at(distilled_timesteps(steps))
    # A consistency model's claim at t > 0 keeps a share of x of 1e-9.
    run = jax.jit(
        lambda x: sample(
            lambda x, p: jnp.full_like(x, 0.3),
            x,
            SAMPLERS[name](schedule),
            jax.random.key(1),
            prediction="data",
        )
    )
    np.testing.assert_allclose(run(NOISE), 0.3, atol=2e-4 if name == "lcm" else 2e-6)


@pytest.mark.parametrize("name", ["ddpm", "dpm++2m-sde"])
def test_a_row_does_not_depend_on_its_batch(name):
    table = SAMPLERS[name](CHAIN.schedule(6))
    keys = jax.random.split(jax.random.key(3), 4)
    whole = sample(pull, NOISE, table, keys, prediction="data")
    alone = sample(pull, NOISE[2:3], table, keys[2:3], prediction="data")
    np.testing.assert_array_equal(whole[2:3], alone)
    assert (sample(pull, NOISE, table, jax.random.key(4), prediction="data") != whole).any()


@pytest.mark.parametrize("name", ["dpm++2m", "heun", "unipc"])
def test_rows_at_different_steps_advance_together(name):
    """The step of a server that batches requests: rows of coefficients instead of numbers."""
    table = SAMPLERS[name](flow(5, shift=2.0) if name != "unipc" else CHAIN.schedule(5))

    def row(steps):
        def at(values):
            return jnp.asarray(values[np.asarray(steps)], jnp.float32)

        return Row(
            Point(*at(table.points).T),
            tuple(at(table.correct).T),
            tuple(at(table.update).T),
            at(table.noise),
        )

    empty = jnp.zeros((table.memory, *NOISE.shape))
    states = [State(NOISE, NOISE, empty)]
    for step in range(3):
        claim = pull(states[-1].x_BX, None)
        states.append(advance(states[-1], claim, row(np.full(4, step)), None))
    mixed = State(
        *(
            jnp.stack([getattr(states[s], f)[b] for b, s in enumerate([2, 0, 1, 2])])
            for f in ("x_BX", "z_BX")
        ),
        jnp.stack([states[s].d_KBX[:, b] for b, s in enumerate([2, 0, 1, 2])], 1),
    )
    after = advance(mixed, pull(mixed.x_BX, None), row([2, 0, 1, 2]), None)
    for b, s in enumerate([3, 1, 2, 3]):
        np.testing.assert_allclose(after.x_BX[b], states[s].x_BX[b], rtol=1e-5, atol=1e-6)


def test_inpainting_keeps_what_is_masked():
    schedule, data = flow(6), jnp.full_like(NOISE, 0.8)
    mask = jnp.zeros_like(NOISE).at[:, 1:].set(1)
    hook = inpaint(data, mask, NOISE)
    seen = []

    def network(x, point):
        jax.debug.callback(lambda x, a, s: seen.append((np.asarray(x), a, s)), x, *point[1:])
        return pull(x, point)

    found = sample(network, noised(schedule, NOISE), ddim(schedule), prediction="data", after=hook)
    jax.effects_barrier()
    np.testing.assert_allclose(found[:, :1], 0.8, rtol=1e-6)
    assert (jnp.abs(found[:, 1:]) < 0.6).all()
    for x, alpha, sigma in seen[1:]:  # the network sees the rest at its own level of noise
        np.testing.assert_allclose(
            x[:, :1], alpha * 0.8 + sigma * NOISE[:, :1], rtol=1e-5, atol=1e-6
        )


def test_a_start_from_images_keeps_the_last_steps():
    schedule = CHAIN.schedule(10)
    part = schedule.from_strength(0.3)
    assert part.steps == 3
    np.testing.assert_array_equal(part.sigma, schedule.sigma[7:])
    # A part of a step is run of a flow alone.
    assert [each.from_strength(0.35).steps for each in (schedule, flow(10))] == [3, 4]
    start = noised(part, NOISE, jnp.ones_like(NOISE))
    expected = part.alpha[0] + part.sigma[0] * np.asarray(NOISE)
    np.testing.assert_allclose(start, expected, rtol=1e-6)


def conditioned(x, point, condition):
    return x * condition[:, :, None] + condition[:, :, None]


def test_guidance_is_its_formula():
    yes, no = jnp.full((4, 3), 2.0), jnp.full((4, 3), 0.5)
    point = Point(*(jnp.float32(v) for v in (500.0, 0.6, 0.8)))
    a, b = conditioned(NOISE, point, yes), conditioned(NOISE, point, no)
    np.testing.assert_allclose(
        guided(conditioned, yes, no, 4.0)(NOISE, point), b + 4 * (a - b), rtol=1e-5
    )
    each = jnp.array([1.0, 2.0, 0.0, 4.0])
    found = guided(conditioned, yes, no, each)(NOISE, point)
    np.testing.assert_allclose(found, b + each[:, None, None] * (a - b), rtol=1e-5, atol=1e-6)
    rescaled = guided(conditioned, yes, no, 4.0, rescale=1.0)(NOISE, point)
    np.testing.assert_allclose(rescaled.std((1, 2)), a.std((1, 2)), rtol=1e-5)


def test_guidance_only_in_its_interval():
    yes, no = jnp.full((4, 3), 2.0), jnp.full((4, 3), 0.5)
    run = guided(conditioned, yes, no, 4.0, interval=(0.5, 1.0))
    everywhere = guided(conditioned, yes, no, 4.0)
    for ratio, inside in ((0.5, False), (0.7, True), (1.0, True), (1.1, False)):
        point = Point(jnp.float32(0), jnp.float32(1), jnp.float32(ratio))
        expected = everywhere(NOISE, point) if inside else conditioned(NOISE, point, yes)
        np.testing.assert_allclose(run(NOISE, point), expected, rtol=1e-6)
    rows = Point(jnp.zeros(4), jnp.ones(4), jnp.array([0.4, 0.7, 0.9, 2.0]))
    mixed = run(NOISE, rows)
    np.testing.assert_allclose(mixed[1], everywhere(NOISE, rows)[1], rtol=1e-6)
    np.testing.assert_allclose(mixed[3], conditioned(NOISE, rows, yes)[3], rtol=1e-5)


def test_perpendicular_negatives():
    """A negative along the prompt changes nothing; one across it is taken away whole."""
    base = jnp.zeros((2, 4))
    prompt = base.at[:, 0].set(1.0)
    across = base.at[:, 1].set(1.0)
    network = lambda x, point, condition: condition  # noqa: E731
    point = Point(*(jnp.float32(0.5),) * 3)
    x = jnp.zeros((2, 4))
    along = perpendicular(network, prompt, 3 * prompt, base, 2.0)(x, point)
    np.testing.assert_allclose(along, 2 * prompt, atol=1e-6)
    both = perpendicular(network, prompt, prompt + across, base, 2.0, negative_scale=0.5)(x, point)
    np.testing.assert_allclose(both, 2 * prompt - across, atol=1e-6)


def test_resolution_shift_has_flux_ends():
    assert np.log(resolution_shift(256)) == pytest.approx(0.5)
    assert np.log(resolution_shift(4096)) == pytest.approx(1.15)


ZERO = Discrete(zero_terminal_snr(linear_betas()))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda: CHAIN.schedule(0), "steps=0"),
        (lambda: CHAIN.schedule(1001), "1 to 1000"),
        (lambda: CHAIN.schedule(1000, "leading", offset=1), r"\[0, 1000\)"),
        (lambda: CHAIN.schedule(5, "karas"), "karras"),
        (lambda: ZERO.schedule(5, "karras"), "zero terminal SNR"),
        (lambda: heun(ZERO.schedule(5)), "heun"),
        (lambda: unipc(ZERO.schedule(5)), "unipc"),
        (lambda: ddim(CHAIN.schedule(5), eta=2.0), "eta=2"),
        (lambda: tcd(CHAIN.schedule(5), CHAIN.levels, gamma=-1), "gamma=-1"),
        (lambda: flow(1, terminal=0.1), "two steps"),
        (lambda: flow(4, shift=0.0), "shift"),
        (lambda: edm(4, low=3.0, high=2.0), "low < high"),
        (lambda: CHAIN.schedule(5).from_strength(0.1), "strength=0.1"),
        (lambda: CHAIN.schedule(5).from_strength(1.5), "strength=1.5"),
        (lambda: CHAIN.at([3, 900]), "does not fall"),
        (lambda: Discrete(np.array([0.1, -0.2])), "betas"),
        (lambda: distilled_timesteps(60), "original=50"),
        (
            lambda: Schedule(path="flow", t=np.ones(2), alpha=np.ones(2), sigma=np.ones(3)),
            "shapes",
        ),
        (lambda: sample(pull, NOISE, ddim(CHAIN.schedule(5), 1.0), prediction="data"), "key"),
        (
            lambda: sample(pull, NOISE.astype("bfloat16"), ddim(flow(2)), prediction="data"),
            "bfloat16",
        ),
        (lambda: sample(pull, NOISE, ddim(ZERO.schedule(5)), prediction="noise"), "predicts v"),
        (lambda: guided(conditioned, 0, 0, 2.0, rescale=2.0), "rescale"),
        (lambda: guided(conditioned, 0, 0, 2.0, interval=(2.0, 1.0)), "interval"),
    ],
)
def test_bad_values_are_refused(wrong, says):
    with pytest.raises(ConfigError, match=says):
        wrong()
