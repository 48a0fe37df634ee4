"""bfloat16 parameters move as float32 ones do: rounding loses no update on average."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from fornax.config import ConfigError
from fornax.optim import (
    EMA,
    SGD,
    SOAP,
    Adafactor,
    AdamW,
    Constant,
    Lion,
    Lookahead,
    Muon,
    OptimConfig,
    RMSProp,
    build,
)
from fornax.optim.rounding import round_stochastically

AXES = {"w": ("embed", "mlp"), "scale": ("norm",)}
RATE, CALLS = 5e-5, 200


def config(optimizer, **more):
    defaults = {"learning_rate": RATE, "schedule": Constant(), "clip": ()}
    return OptimConfig(optimizer=optimizer, **{**defaults, **more})


def start(dtype):
    rng = np.random.default_rng(0)
    signs = rng.choice([-1.0, 1.0], size=(32, 48))
    return {
        "w": jnp.asarray(0.02 * signs, jnp.bfloat16).astype(dtype),
        "scale": jnp.ones((48,), dtype),
    }


def run(chain_config, dtype, grads, calls=CALLS):
    params = start(dtype)
    built = build(chain_config, total_steps=calls, params=params, axes=AXES)

    @jax.jit
    def train(params):
        def step(carry, _):
            params, state = carry
            return built.update(grads, state, params), None

        return jax.lax.scan(step, (params, built.init(params)), length=calls)[0]

    return train(params)


def displacement(params):
    """Of the matrix: over its 1,536 entries the noise of the rounding averages out."""
    before = np.asarray(start(jnp.float32)["w"])
    return np.ravel(np.asarray(params["w"], np.float64) - before)


@pytest.mark.parametrize(
    "chain",
    [
        config(AdamW(weight_decay=0.0)),
        config(AdamW(weight_decay=0.0, mu_dtype="bfloat16")),
        config(AdamW(weight_decay=0.0, b2=0.999), accumulate=2),
        config(AdamW(weight_decay=0.0), lookahead=Lookahead()),
        config(Lion(weight_decay=0.0)),
        config(Adafactor(min_dim_size_to_factor=16, multiply_by_parameter_scale=False)),
        config(Muon(weight_decay=0.0)),
        config(SOAP(weight_decay=0.0)),
        config(SGD()),
        config(RMSProp()),
    ],
    ids=lambda chain: (
        f"{chain.optimizer.type}-{chain.accumulate}-{getattr(chain.optimizer, 'mu_dtype', None)}"
        f"{'-lookahead' if chain.lookahead else ''}"
    ),
)
def test_small_equal_updates_move_the_parameters_as_far_as_in_float32(chain):
    """Each is under half a unit in the last place of 0.02: rounded to the nearest, none counts."""
    rng = np.random.default_rng(1)
    grads = {"w": rng.normal(size=(32, 48)) * 0.3, "scale": rng.normal(size=48) * 0.3}
    grads = jax.tree.map(lambda g: jnp.asarray(g, jnp.float32), grads)
    wide, narrow = (
        displacement(run(chain, dtype, grads)[0]) for dtype in (jnp.float32, jnp.bfloat16)
    )
    assert np.abs(wide).max() > 1e-4
    assert narrow @ wide / (wide @ wide) == pytest.approx(1, abs=0.05)


def test_state_is_float32_and_the_average_is_that_of_unrounded_parameters():
    grads = jax.tree.map(lambda p: jnp.full(p.shape, 0.1), start(jnp.float32))
    chain = config(AdamW(weight_decay=0.0), ema=EMA(decay=0.5))
    _, state = run(chain, jnp.bfloat16, grads, calls=20)
    kinds = {leaf.dtype.name for leaf in jax.tree.leaves(state) if leaf.ndim}
    assert kinds == {"float32"}


def test_a_value_is_rounded_up_with_the_probability_that_keeps_its_mean():
    """Chi-square over 64 places between two neighbours, 4,096 draws each."""
    low = np.float32(0.0200195312)  # a bfloat16
    unit = np.float32(2.0**-13)
    share = (np.arange(64) + 0.5) / 64
    values = (low + unit * share).astype(np.float32)
    draws = [
        np.asarray(round_stochastically(jnp.tile(values, (16, 1)), jnp.int32(call), 3))
        for call in range(256)
    ]
    ups = np.sum(np.concatenate(draws).astype(np.float64) > low, axis=0)
    trials = 16 * 256
    z = (ups - trials * share) / np.sqrt(trials * share * (1 - share))
    assert 30 < np.sum(z**2) < 110  # 64 degrees of freedom: outside with odds below 1e-3


def test_neighbours_updates_and_arrays_are_rounded_independently():
    half = jnp.full((256, 256), 1 + 2.0**-8, jnp.float32)

    def bits(call, leaf):
        rounded = np.asarray(round_stochastically(half, jnp.int32(call), leaf), np.float64)
        return np.where(rounded > 1, 1.0, -1.0)

    one = bits(7, 0)
    shifted = [np.roll(one, 1, 0), np.roll(one, 1, 1)]
    for other in (bits(8, 0), bits(7, 1), bits(1 << 20, 0), one.T, *shifted):
        assert abs(np.mean(one * other)) < 4 / 256
    assert abs(np.mean(one)) < 4 / 256


def test_what_bfloat16_holds_stays_as_it_is():
    exact = np.asarray([0.0, -0.0, 1.0, -3.5, 2.0**-120, np.inf, -np.inf, np.nan], np.float32)
    for call in range(20):
        got = round_stochastically(jnp.asarray(exact), jnp.int32(call), 0)
        np.testing.assert_array_equal(np.asarray(got, np.float32), exact)
    near = np.asarray([1.001, -1.001, 3.3e38], np.float32)
    got = np.asarray(round_stochastically(jnp.asarray(near), jnp.int32(0), 0), np.float32)
    assert np.all(np.abs(got - near) <= np.abs(near) * 2.0**-7)
    assert np.all(np.sign(got) == np.sign(near))


def test_eight_devices_round_as_one_does():
    """Elementwise optimizers: not a bit differs, wherever an element lies."""
    rng = np.random.default_rng(2)
    params = {
        "w": jnp.asarray(rng.normal(size=(32, 48)), jnp.bfloat16),
        "scale": jnp.ones((48,), jnp.bfloat16),
    }
    grads = jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), jnp.float32), params)
    built = build(config(AdamW(), learning_rate=1e-3), total_steps=4, params=params, axes=AXES)
    mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
    where = {
        "w": NamedSharding(mesh, PartitionSpec("fsdp", "tensor")),
        "scale": NamedSharding(mesh, PartitionSpec()),
    }
    on_mesh = built.state_shardings(where)
    step = jax.jit(built.update, out_shardings=(where, on_mesh))
    one_step = jax.jit(built.update)
    many, state = jax.device_put((params, built.init(params)), (where, on_mesh))
    one, one_state = params, built.init(params)
    for _ in range(4):
        many, state = step(jax.device_put(grads, where), state, many)
        one, one_state = one_step(grads, one_state, one)
    jax.tree.map(np.testing.assert_array_equal, many, one)
    assert not np.array_equal(one["w"], params["w"])


def test_donated_parameters_and_state_are_updated_in_place():
    """No float32 copy of the parameters, no array of random bits beside them."""
    params = {"w": jnp.ones((512, 1024), jnp.bfloat16)}
    built = build(config(AdamW()), total_steps=4, params=params)
    state = jax.eval_shape(built.init, params)
    grads = {"w": jax.ShapeDtypeStruct((512, 1024), jnp.float32)}

    def step(params, state, grads):
        return built.update(grads, state, params)

    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(params, state, grads).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= 512 * 1024 * (2 + 4 + 4)
    assert memory.temp_size_in_bytes < 512 * 1024


def test_a_parameter_of_another_type_is_refused():
    with pytest.raises(ConfigError, match=r"parameter w is float16.*float32 or bfloat16"):
        build(config(AdamW()), total_steps=4, params={"w": jnp.ones((4, 4), jnp.float16)})
