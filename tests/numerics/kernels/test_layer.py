"""What lies between a decoder's products, against float64 and the same alone as beside others."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fornax import kernels
from fornax.config.errors import KernelError


def _gated(gate: np.ndarray, up: np.ndarray, activation: str) -> np.ndarray:
    """The formula in float64; GELU by its tanh."""
    with np.errstate(over="ignore"):
        return gate / (1 + np.exp(-_exponent(gate, activation))) * up


def _exponent(gate: np.ndarray, activation: str) -> np.ndarray:
    if activation == "silu":
        return gate
    return 2 * np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)


def _rows(rows: int, width: int, dtype: str) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    gate, up = 4 * rng.normal(size=(2, rows, width))
    gate.flat[:6] = (0.0, -0.0, 80.0, -80.0, -200.0, 1e-30)
    return jnp.asarray(gate, dtype), jnp.asarray(up, dtype)


@pytest.mark.parametrize(
    ("implementation", "dtype"),
    [("native", "float32"), ("native", "bfloat16"), ("xla", "float32")],
)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(("rows", "width"), [(1, 7), (3, 1000), (40, 2049)])
def test_gated_linear_unit_agrees_with_float64(
    rows, width, activation, implementation, dtype
) -> None:
    gate, up = _rows(rows, width, dtype)
    found = kernels.gated_linear_unit(
        gate, up, activation=activation, implementation=implementation
    )
    assert found.dtype == gate.dtype
    wide = np.asarray(gate, np.float64)
    exact = _gated(wide, np.asarray(up, np.float64), activation)
    # e^u is as many roundings off as u is large; the result is rounded once.
    last = 2.0**-24 if dtype == "float32" else 2.0**-8
    allowed = last + 2.0**-22 * (1 + np.abs(_exponent(wide, activation)))
    wrong = np.abs(np.asarray(found, np.float64) - exact)
    assert np.all(wrong <= allowed * np.abs(exact) + 1e-30)


def test_what_is_not_finite_stays_so_in_a_gated_linear_unit() -> None:
    gate = jnp.asarray([jnp.nan, jnp.inf, 1.0, 1.0])
    up = jnp.asarray([1.0, 1.0, jnp.nan, -jnp.inf])
    found = kernels.gated_linear_unit(gate, up, activation="silu", implementation="native")
    np.testing.assert_array_equal(found, [np.nan, np.inf, np.nan, -np.inf])


def test_row_of_a_gated_linear_unit_is_the_same_whatever_is_beside_it() -> None:
    gate, up = _rows(64, 1333, "float32")
    run = jax.jit(lambda g, u: kernels.gated_linear_unit(g, u, activation="silu"))
    whole = run(gate, up)
    for count in (1, 3, 31):
        np.testing.assert_array_equal(run(gate[-count:], up[-count:]), whole[-count:])


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gradient_of_a_gated_linear_unit_is_that_of_differences(activation) -> None:
    rng = np.random.default_rng(1)
    gate, up, weight = rng.normal(size=(3, 2, 9))

    def loss(gate: jax.Array, up: jax.Array) -> jax.Array:
        y = kernels.gated_linear_unit(gate, up, activation=activation)
        return jnp.sum(y * jnp.asarray(weight, y.dtype))

    arrays = jnp.asarray(gate, jnp.float32), jnp.asarray(up, jnp.float32)
    found = jax.grad(loss, (0, 1))(*arrays)
    step = 1e-6
    for index, (ours, moved) in enumerate(zip(found, (gate, up), strict=True)):
        for place in np.ndindex(moved.shape):
            sides = []
            for sign in (1, -1):
                pair = [gate.copy(), up.copy()]
                pair[index][place] += sign * step
                sides.append(np.sum(_gated(*pair, activation) * weight))
            assert ours[place] == pytest.approx((sides[0] - sides[1]) / (2 * step), abs=1e-5)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(
    ("implementation", "dtype"),
    [("native", "float32"), ("native", "bfloat16"), ("xla", "float32")],  # which rounds each step
)
@pytest.mark.parametrize(("rows", "width"), [(3, 1000), (40, 2049)])
def test_gradients_of_a_gated_linear_unit_agree_with_float64(
    rows, width, dtype, activation, implementation
) -> None:
    gate, up = _rows(rows, width, dtype)
    dy = jnp.asarray(np.random.default_rng(2).normal(size=gate.shape), dtype)

    def unit(gate: jax.Array, up: jax.Array) -> jax.Array:
        return kernels.gated_linear_unit(
            gate, up, activation=activation, implementation=implementation
        )

    found = jax.vjp(unit, gate, up)[1](dy)
    x, u, d = (np.asarray(array, np.float64) for array in (gate, up, dy))
    inner, slope = x, 1.0
    if activation == "gelu_tanh":
        inner = np.sqrt(8 / np.pi) * (x + 0.044715 * x**3)
        slope = np.sqrt(8 / np.pi) * (1 + 3 * 0.044715 * x**2)
    sigmoid = np.exp(-np.logaddexp(0, -inner))
    exact = d * u * (sigmoid + x * sigmoid * (1 - sigmoid) * slope), d * x * sigmoid
    allowed = 1e-5 if dtype == "float32" else 2**-8
    for ours, right in zip(found, exact, strict=True):
        assert ours.dtype == gate.dtype
        np.testing.assert_allclose(np.asarray(ours, np.float64), right, rtol=allowed, atol=allowed)


def test_a_gated_linear_unit_is_differentiated_forwards_and_in_part() -> None:
    """With a frozen gate or up, by jvp, under vmap and twice."""
    gate, up = _rows(5, 300, "float32")

    def unit(gate: jax.Array, up: jax.Array) -> jax.Array:
        return kernels.gated_linear_unit(gate, up, activation="silu")

    def formula(gate: jax.Array, up: jax.Array) -> jax.Array:
        return gate * jax.nn.sigmoid(gate) * up

    def compare(transform: Callable) -> None:
        ours, plain = transform(unit), transform(formula)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), ours, plain)

    compare(lambda f: jax.grad(lambda u: f(gate, u).sum())(up))
    compare(lambda f: jax.grad(lambda g: f(g, up).sum())(gate))
    compare(lambda f: jax.jvp(f, (gate, up), (up, gate)))
    compare(lambda f: jax.vmap(jax.grad(lambda g, u: f(g, u).sum(), (0, 1)))(gate, up))
    compare(lambda f: jax.grad(lambda g: jax.grad(lambda h: f(h, up).sum())(g)[1].sum())(gate))


def test_unlike_gate_and_up_are_named() -> None:
    with pytest.raises(KernelError, match="must be alike"):
        kernels.gated_linear_unit(jnp.ones((2, 5)), jnp.ones((2, 4)), activation="silu")
    with pytest.raises(KernelError, match="silu, gelu_tanh"):
        kernels.gated_linear_unit(jnp.ones(4), jnp.ones(4), activation="relu")


def _turned(x: np.ndarray, angles: np.ndarray, interleaved: bool) -> np.ndarray:
    """Pairs as complex numbers times e^(i angle); real parts first, then imaginary ones."""
    r = angles.shape[-1]
    first, second = (
        (x[..., : 2 * r : 2], x[..., 1 : 2 * r : 2])
        if interleaved
        else (x[..., :r], x[..., r : 2 * r])
    )
    pairs = (first + 1j * second) * np.exp(1j * angles[:, :, None])
    return np.concatenate([pairs.real, pairs.imag, x[..., 2 * r :]], axis=-1)


@pytest.mark.parametrize("implementation", ["native", "xla"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("batch", "tokens", "heads", "width", "pairs"),
    [(1, 1, 2, 64, 32), (2, 5, 3, 20, 7), (1, 300, 8, 64, 16)],
)
def test_rotary_embedding_agrees_with_float64(
    batch, tokens, heads, width, pairs, interleaved, dtype, implementation
) -> None:
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(batch, tokens, heads, width)), dtype)
    angles = rng.uniform(-7, 7, size=(batch, tokens, pairs))
    cos, sin = jnp.asarray(np.cos(angles), jnp.float32), jnp.asarray(np.sin(angles), jnp.float32)
    found = kernels.rotary_embedding(x, cos, sin, interleaved, implementation=implementation)
    exact = _turned(np.asarray(x, np.float64), angles, interleaved)
    assert found.dtype == x.dtype
    rounding = 2.0**-22 if dtype == "float32" else 2.0**-8
    np.testing.assert_allclose(
        np.asarray(found, np.float64), exact, rtol=rounding, atol=6 * 2.0**-22
    )


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("pairs", [5, 6])
def test_gradient_of_a_rotary_embedding_turns_back(pairs, interleaved) -> None:
    rng = np.random.default_rng(0)
    x, dy = rng.normal(size=(2, 1, 3, 2, 12))
    angles = rng.uniform(-3, 3, size=(1, 3, pairs))
    cos, sin = jnp.asarray(np.cos(angles), jnp.float32), jnp.asarray(np.sin(angles), jnp.float32)
    _, back = jax.vjp(
        lambda x: kernels.rotary_embedding(x, cos, sin, interleaved), jnp.asarray(x, jnp.float32)
    )
    (found,) = back(jnp.asarray(dy, jnp.float32))
    # <dy, R v> = <R^T dy, v> for every v.
    v = rng.normal(size=x.shape)
    left = np.sum(dy * _turned(v, angles, interleaved))
    assert np.sum(np.asarray(found, np.float64) * v) == pytest.approx(left, abs=1e-5)


def test_rotary_embedding_of_unlike_arrays_is_named() -> None:
    x = jnp.ones((1, 2, 3, 8))
    with pytest.raises(KernelError, match="2 r at most H"):
        kernels.rotary_embedding(x, jnp.ones((1, 2, 5)), jnp.ones((1, 2, 5)))
    with pytest.raises(KernelError, match=r"\[B, T, r\]"):
        kernels.rotary_embedding(x, jnp.ones((2, 2, 4)), jnp.ones((2, 2, 4)))


@pytest.mark.parametrize("implementation", ["native", "xla"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_rows_are_those_of_the_table(stored, dtype, implementation) -> None:
    table = jnp.asarray(np.random.default_rng(0).normal(size=(50, 33)), stored)
    index = jnp.asarray([[3, 49, 0], [-1, 50, -50]], jnp.int32)
    found = kernels.take_rows(table, index, dtype=dtype, implementation=implementation)
    wide = np.asarray(table, np.float32)
    exact = np.stack([wide[[3, 49, 0]], [wide[49], np.full(33, np.nan), wide[0]]])
    assert found.dtype == dtype
    np.testing.assert_array_equal(
        np.asarray(found, np.float32), exact.astype(found.dtype).astype(np.float32)
    )


def test_gradient_of_a_row_is_summed_in_float32() -> None:
    table = jnp.zeros((4, 2), jnp.bfloat16)
    index = jnp.zeros(1000, jnp.int32).at[0].set(3)
    slope = jax.grad(lambda t: kernels.take_rows(t, index, dtype="float32").sum())(table)
    expected = np.zeros((4, 2))
    expected[0], expected[3] = 1000, 1
    np.testing.assert_array_equal(np.asarray(slope, np.float32), expected)


@pytest.mark.parametrize("implementation", ["native", "xla"])
@pytest.mark.parametrize("width", [1, 5, 1024, 8193, 32000])
def test_argmax_is_the_first_of_the_greatest(width, implementation) -> None:
    rng = np.random.default_rng(width)
    x = np.round(rng.normal(size=(9, width)), 1).astype(np.float32)  # ties
    x[1] = -np.inf
    x[2, width // 2] = np.nan
    x[3, -1] = np.inf
    x[4, : width // 2] = -np.inf
    x[5] = -3.5
    found = kernels.argmax(jnp.asarray(x), implementation=implementation)
    exact = np.argmax(x, axis=1)
    exact[[1, 2, 3]] = -1
    np.testing.assert_array_equal(found, exact)
