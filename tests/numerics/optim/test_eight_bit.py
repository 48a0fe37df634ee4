"""Moments in 8 bits: the map as its paper lists it, updates beside a loop in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from fornax.config import ConfigError, from_mapping
from fornax.mesh import use_mesh
from fornax.optim import AdamW, AdamW8bit, Constant, OptimConfig, build
from fornax.optim.eight_bit import Blocks, dequantize, quantize

pytestmark = pytest.mark.usefixtures("optimized")

BLOCK = 64
AXES = {
    "embed": ("vocab", "embed"),
    "layers": {
        "q": ("layers", "embed", "heads", "head_dim"),
        "o": ("layers", "heads", "head_dim", "embed"),
        "narrow": ("layers", "embed", "mlp"),
        "scale": ("layers", "norm"),
    },
}
SHAPES = {
    "embed": (96, 128),
    "layers": {
        "q": (2, 128, 2, 64),
        "o": (2, 2, 64, 128),
        "narrow": (2, 128, 16),
        "scale": (2, 128),
    },
}
RULES = {"embed": "fsdp", "heads": "tensor", "vocab": "tensor"}


def is_tuple(node):
    return isinstance(node, tuple)


def make(seed, scale=1.0):
    rng = np.random.default_rng(seed)

    def one(shape):
        spread = 10 ** rng.uniform(-4, 0, shape)
        return (scale * spread * rng.normal(size=shape)).astype(np.float32)

    return jax.tree.map(one, SHAPES, is_leaf=is_tuple)


def dynamic_map(signed):
    """All 256 values in order: of each decade the middles of equal parts of it, 0 and 1."""
    values = [0.0, 1.0]
    for decade in range(7):
        edges = np.linspace(0.1, 1, 2 ** (decade + (not signed)) + 1)
        middles = 10.0 ** (decade - 6) * (edges[1:] + edges[:-1]) / 2
        values += [*middles, *(-middles if signed else [])]
    assert len(values) == 256
    return np.sort(values)


def nearest(x, signed):
    values = dynamic_map(signed)
    return np.searchsorted((values[1:] + values[:-1]) / 2, x)


@pytest.mark.parametrize("signed", [True, False])
def test_every_code_stands_for_its_value_and_comes_back(signed):
    codes = np.arange(256, dtype=np.uint8)

    @jax.jit
    def there_and_back(codes):
        values = dequantize(Blocks(codes, np.ones(4, np.float32)), 0, signed=signed)
        ones = jnp.ones((1, 256))  # so that each block's largest value is one
        rows = jnp.concatenate([values[None], jnp.tile(ones, (BLOCK - 1, 1))])
        return values, quantize(rows, 0, signed=signed).codes[0]

    values, again = there_and_back(codes)
    np.testing.assert_allclose(values, dynamic_map(signed), rtol=1e-6)
    np.testing.assert_array_equal(again, codes)


@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_the_nearest_of_each_block(signed):
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(3, 128, 40)) * 10 ** rng.uniform(-8, 0, (3, 128, 40))).astype(np.float32)
    x[0, :BLOCK, 0], x[1, :BLOCK, 1] = 0, 1e-39
    x = x if signed else np.abs(x)
    found = jax.jit(lambda x: quantize(x, 1, signed=signed))(x)
    blocks = x.reshape(3, 2, BLOCK, 40)
    largest = np.abs(blocks).max(axis=2)
    np.testing.assert_allclose(found.scales, largest, rtol=0, atol=1e-38)  # XLA flushes 1e-39
    kept = np.where(largest < np.finfo(np.float32).tiny, np.inf, largest).astype(np.float64)
    want = nearest(blocks / kept[:, :, None], signed).reshape(x.shape)
    if not signed:
        want = np.where((x > 0) & (np.repeat(kept, BLOCK, 1) < np.inf), np.maximum(want, 1), want)
    codes = np.asarray(found.codes).astype(int)
    # Only what lies on the edge between two codes, within float32's last place, may fall otherwise.
    assert np.abs(codes - want).max() <= 1
    assert (codes != want).mean() < 1e-4


def reference(params, gradients, decays, *, rate, b1, b2, eps, weight_decay, axis):
    """A loop over updates in float64, its moments rounded block by block along `axis`."""
    x, m, v = params.astype(np.float64), np.zeros(params.shape), np.zeros(params.shape)

    def rounded(moment, signed):
        if axis is None:
            return moment
        blocks = np.moveaxis(moment, axis, -1)
        shape = blocks.shape
        blocks = blocks.reshape(-1, BLOCK)
        scales = np.abs(blocks).max(1, keepdims=True)
        codes = nearest(blocks / np.where(scales == 0, 1, scales), signed)
        codes = codes if signed else np.where(blocks > 0, np.maximum(codes, 1), codes)
        return np.moveaxis((dynamic_map(signed)[codes] * scales).reshape(shape), -1, axis)

    for number, gradient in enumerate(gradients, start=1):
        m = b1 * m + (1 - b1) * gradient
        v = b2 * v + (1 - b2) * np.square(gradient, dtype=np.float64)
        step = (m / (1 - b1**number)) / (np.sqrt(v / (1 - b2**number)) + eps)
        x = x - rate * (step + (weight_decay * x if decays else 0))
        m, v = rounded(m, True), rounded(v, False)
    return x


def config(optimizer, rate=1e-2, **more):
    return OptimConfig(
        optimizer=optimizer, learning_rate=rate, schedule=Constant(), clip=(), **more
    )


def test_updates_equal_a_loop_in_numpy():
    """Matrices that are large enough by blocks along their inputs, all else in float32."""
    params, calls = make(0), [make(seed) for seed in range(1, 9)]
    chain = build(config(AdamW8bit()), total_steps=8, params=params, axes=AXES)
    found, state = params, jax.jit(chain.init)(params)
    step = jax.jit(chain.update)
    for gradients in calls:
        found, state = step(gradients, state, found)
    axes = {"embed": None, "q": 1, "o": 2, "narrow": None, "scale": None}
    for name, axis in axes.items():

        def of(tree, name=name):
            return tree["embed"] if name == "embed" else tree["layers"][name]

        options = {"rate": 1e-2, "b1": 0.9, "b2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
        want = reference(
            of(params), [of(each) for each in calls], name != "scale", axis=axis, **options
        )
        off = np.abs(np.asarray(of(found)) - want)
        # A moment on the edge between two codes takes the other one: few do, by a code's width.
        assert np.mean(off > 1e-5) < 2e-3, name
        assert off.max() < 1e-2, name


def test_an_element_whose_gradient_vanishes_does_not_jump():
    """Its second moment is far below its block's largest: rounded to zero, mu / eps would move it
    by thousands of steps."""
    params = {"w": np.zeros((64, 64), np.float32)}
    chain = build(config(AdamW8bit(weight_decay=0.0)), total_steps=4, params=params)
    state, step = chain.init(params), jax.jit(chain.update)
    first = np.ones((64, 64), np.float32)
    first[0] = 1e-4
    second = first.copy()
    second[0] = 0
    found = params
    for gradients in (first, second):
        before = found
        found, state = step({"w": gradients}, state, found)
    assert np.abs(found["w"] - before["w"]).max() < 2e-2


@pytest.mark.slow
def test_one_device_and_eight_have_the_same_codes():
    """Blocks depend on the parameter only, so no codes are made again where a mesh is another."""
    params = make(0)
    mesh = jax.make_mesh((2, 4), ("tensor", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    where = jax.tree.map(
        lambda axes: NamedSharding(mesh, PartitionSpec(*(RULES.get(name) for name in axes))),
        AXES,
        is_leaf=is_tuple,
    )
    chain = build(config(AdamW8bit()), total_steps=4, params=params, axes=AXES)
    on_mesh = chain.state_shardings(where)
    moment = on_mesh[0].mu["layers"]["q"]
    assert moment.codes.spec == PartitionSpec(None, "fsdp", "tensor", None)
    assert moment.scales.spec == PartitionSpec(None, None, "tensor", None)  # two blocks for four
    assert on_mesh[0].mu["layers"]["o"].scales.spec == PartitionSpec(None, "tensor", None, "fsdp")

    def update(*arguments):
        with use_mesh(mesh):
            return chain.update(*arguments)

    many_step = jax.jit(
        update, in_shardings=(where, on_mesh, where), out_shardings=(where, on_mesh)
    )
    one_step = jax.jit(chain.update)
    one, one_state = params, jax.jit(chain.init)(params)
    many, many_state = jax.device_put(params, where), jax.device_put(one_state, on_mesh)
    for seed in range(1, 5):
        one, one_state = one_step(make(seed), one_state, one)
        many, many_state = many_step(jax.device_put(make(seed), where), many_state, many)
    jax.tree.map(np.testing.assert_array_equal, one_state, many_state)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), one, many)


@pytest.mark.slow
def test_it_learns_as_float32_moments_do():
    """Least squares of a two-layer network from batches, within a hundredth of the loss."""
    rng = np.random.default_rng(0)
    target = rng.normal(size=(64, 64)).astype(np.float32) / 8
    start = {
        "a": rng.normal(size=(64, 128)).astype(np.float32) / 8,
        "b": rng.normal(size=(128, 64)).astype(np.float32) / 12,
    }
    x = rng.normal(size=(300, 32, 64)).astype(np.float32)

    def loss(params, x):
        return ((jax.nn.relu(x @ params["a"]) @ params["b"] - x @ target) ** 2).mean()

    ends = []
    for optimizer in (AdamW(), AdamW8bit()):
        chain = build(config(optimizer, 3e-3), total_steps=300, params=start)

        def step(carry, x, chain=chain):
            params, state = carry
            value, grads = jax.value_and_grad(loss)(params, x)
            return chain.update(grads, state, params), value

        _, losses = jax.jit(lambda c, x, step=step: jax.lax.scan(step, c, x))(
            (start, chain.init(start)), x
        )
        ends.append(np.asarray(losses))
    wide, narrow = ends
    assert wide[-20:].mean() < 0.2 * wide[:5].mean()
    np.testing.assert_allclose(narrow[-20:].mean(), wide[-20:].mean(), rtol=0.03)


def test_what_is_no_clear_matrix_is_refused():
    params = {"w": np.zeros((4, 64, 64), np.float32)}
    with pytest.raises(ConfigError, match="adamw8bit cannot tell the matrices in parameter w"):
        build(config(AdamW8bit()), total_steps=1, params=params)


@pytest.mark.parametrize("type_", ["muon", "soap", "shampoo"])
def test_it_is_no_fallback(type_):
    told = {"optimizer": {"type": type_, "fallback": {"type": "adamw8bit"}}}
    with pytest.raises(ConfigError, match="adamw"):
        from_mapping(OptimConfig, told)
