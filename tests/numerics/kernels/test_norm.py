"""The norm against float64, its gradient, and that a row does not depend on what is beside it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fornax import kernels
from fornax.config.errors import KernelError


def _arrays(rows: int, width: int, dtype: str) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    return jnp.asarray(rng.normal(size=(rows, width)), dtype), jnp.asarray(rng.normal(size=width))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("width", [1, 64, 100, 512, 1030])
def test_agrees_with_float64(width, dtype) -> None:
    x, scale = _arrays(300, width, dtype)
    wide = np.asarray(x, np.float64)
    exact = wide / np.sqrt(np.mean(wide**2, axis=1, keepdims=True) + 1e-6) * np.asarray(scale)
    y = np.asarray(kernels.rms_norm(x, scale, eps=1e-6), np.float64)
    allowed = 1e-6 if dtype == "float32" else 2**-8
    np.testing.assert_allclose(y, exact, rtol=allowed, atol=allowed)


@pytest.mark.parametrize("width", [64, 100, 512, 1024])
def test_row_is_the_same_whatever_is_beside_it(width) -> None:
    x, scale = _arrays(512, width, "float32")
    whole = kernels.rms_norm(x, scale, eps=1e-6)
    for count in (1, 2, 3, 7, 16, 130):
        alone = jax.jit(lambda x: kernels.rms_norm(x, scale, eps=1e-6))(x[-count:])
        np.testing.assert_array_equal(alone, whole[-count:])


def test_several_axes_are_normalised_as_one() -> None:
    x, scale = _arrays(6, 24, "float32")
    y = kernels.rms_norm(x.reshape(2, 3, 4, 6), scale.reshape(4, 6), eps=1e-6)
    np.testing.assert_array_equal(y.reshape(6, 24), kernels.rms_norm(x, scale, eps=1e-6))


def test_gradient_is_that_of_the_formula() -> None:
    def formula(x, scale):
        return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale

    x, scale = _arrays(5, 40, "float32")
    ours = jax.grad(lambda *a: jnp.sin(kernels.rms_norm(*a, eps=1e-6)).sum(), (0, 1))(x, scale)
    plain = jax.grad(lambda *a: jnp.sin(formula(*a)).sum(), (0, 1))(x, scale)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), ours, plain)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("rows", "width"), [(1, 40), (64, 100), (300, 512), (513, 1030)])
def test_gradients_agree_with_float64(rows, width, dtype) -> None:
    x, scale = _arrays(rows, width, dtype)
    dy = jnp.asarray(np.random.default_rng(3).normal(size=x.shape), dtype)
    how = {"eps": 1e-3, "offset": 1.0, "divisor": 2.0}
    found = jax.vjp(lambda x, scale: kernels.rms_norm(x, scale, **how), x, scale)[1](dy)
    wide, d, s = (np.asarray(array, np.float64) for array in (x, dy, scale))
    factor = 1 / np.sqrt(np.mean(wide**2, axis=1, keepdims=True) + 1e-3)
    normal, given = wide * factor, d * (s + 1) / 2
    dx = factor * (given - normal * np.mean(given * normal, axis=1, keepdims=True))
    assert (found[0].dtype, found[1].dtype) == (x.dtype, scale.dtype)
    allowed = 2e-6 if dtype == "float32" else 2**-8
    np.testing.assert_allclose(np.asarray(found[0], np.float64), dx, rtol=allowed, atol=allowed)
    dscale = np.sum(d * normal, axis=0) / 2
    np.testing.assert_allclose(found[1], dscale, rtol=1e-5, atol=1e-5 * np.sqrt(rows))


def test_gradient_of_a_row_is_the_same_whatever_is_beside_it() -> None:
    x, scale = _arrays(300, 100, "float32")
    run = jax.jit(jax.grad(lambda x: jnp.sin(kernels.rms_norm(x, scale, eps=1e-6)).sum()))
    whole = run(x)
    for count in (1, 7, 130):
        np.testing.assert_array_equal(run(x[-count:]), whole[-count:])


def test_it_is_differentiated_forwards_and_in_part() -> None:
    """With a frozen input or scale, by jvp, under vmap and twice."""
    x, scale = _arrays(6, 40, "float32")

    def formula(x, scale, **_):
        return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale

    def compare(transform) -> None:
        ours, plain = transform(kernels.rms_norm), transform(formula)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=3e-5), ours, plain)

    compare(lambda f: jax.grad(lambda x: f(x, scale, eps=1e-6).sum())(x))
    compare(lambda f: jax.grad(lambda scale: f(x, scale, eps=1e-6).sum())(scale))
    compare(lambda f: jax.jvp(lambda x: f(x, scale, eps=1e-6), (x,), (x[::-1],)))
    compare(lambda f: jax.vmap(jax.grad(lambda x: f(x, scale, eps=1e-6).sum()))(x))
    compare(lambda f: jax.hessian(lambda x: f(x, scale, eps=1e-6)[0])(x[0]))


def test_axes_that_do_not_fit_are_named() -> None:
    with pytest.raises(KernelError, match="must be scale's"):
        kernels.rms_norm(jnp.ones((2, 5)), jnp.ones(4), eps=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("offset", "divisor"), [(0.0, 1.0), (1.0, 1.0), (1.0, 8.0)])
def test_layer_of_a_stack_is_read_as_it_would_be_alone(offset, divisor, dtype) -> None:
    x, _ = _arrays(9, 70, "float32")
    scales = jnp.asarray(np.random.default_rng(1).normal(size=(3, 70)), dtype)
    how = {"eps": 1e-6, "offset": offset, "divisor": divisor}
    exact = np.asarray(x, np.float64)
    exact = exact / np.sqrt(np.mean(exact**2, axis=1, keepdims=True) + 1e-6)
    exact *= (np.asarray(scales[1].astype(jnp.float32), np.float64) + offset) / divisor

    @jax.jit
    def of_layer(layer: jax.Array) -> jax.Array:
        return kernels.rms_norm(x, kernels.StackedScale(values=scales).at(layer), **how)

    np.testing.assert_allclose(of_layer(1), exact, rtol=1e-6, atol=1e-6)
    for layer in range(3):
        alone = kernels.rms_norm(x, scales[layer], **how)
        np.testing.assert_array_equal(of_layer(layer), alone)
    with kernels.target_platform("tpu"):
        elsewhere = jax.jit(
            lambda: kernels.rms_norm(x, kernels.StackedScale(values=scales).at(1), **how)
        )()
    np.testing.assert_allclose(elsewhere, exact, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("width", [1, 100, 512])
def test_norm_of_a_sum_agrees_with_float64(width, dtype) -> None:
    x, scale = _arrays(40, width, dtype)
    branch = jnp.asarray(np.random.default_rng(1).normal(size=x.shape), dtype)
    total, y = jax.jit(lambda x, branch: kernels.add_rms_norm(x, branch, scale, eps=1e-6))(
        x, branch
    )
    wide = np.asarray(x, np.float64) + np.asarray(branch, np.float64)
    allowed = 1e-6 if dtype == "float32" else 2**-8
    np.testing.assert_allclose(np.asarray(total, np.float64), wide, rtol=allowed, atol=allowed)
    rounded = np.asarray(total, np.float64)
    exact = rounded / np.sqrt(np.mean(rounded**2, axis=1, keepdims=True) + 1e-6)
    exact *= np.asarray(scale)
    np.testing.assert_allclose(np.asarray(y, np.float64), exact, rtol=allowed, atol=allowed)


@pytest.mark.parametrize("stacked", [False, True])
def test_norm_of_a_sum_is_the_norm_after_the_sum(stacked) -> None:
    x, scale = _arrays(70, 520, "float32")
    branch = x[::-1]
    if stacked:
        scale = kernels.StackedScale(values=jnp.stack([scale + 1, scale])).at(1)
    how = {"eps": 1e-6, "offset": 1.0, "divisor": 2.0}
    total, y = kernels.add_rms_norm(x, branch, scale, **how)
    np.testing.assert_array_equal(total, x + branch)
    np.testing.assert_array_equal(y, kernels.rms_norm(x + branch, scale, **how))
    alone = kernels.add_rms_norm(x[-3:], branch[-3:], scale, **how)
    jax.tree.map(np.testing.assert_array_equal, alone, (total[-3:], y[-3:]))


def test_gradient_of_the_norm_of_a_sum_is_that_of_the_formula() -> None:
    def formula(x, branch, scale):
        total = x + branch
        wide = total * jax.lax.rsqrt(jnp.mean(total * total, axis=-1, keepdims=True) + 1e-6)
        return total, wide * scale

    def loss(run, *arrays):
        total, y = run(*arrays)
        return jnp.sum(jnp.sin(y)) + jnp.sum(jnp.cos(total))

    x, scale = _arrays(5, 40, "float32")
    arrays = (x, x[::-1] * 0.3, scale)
    ours = jax.grad(lambda *a: loss(lambda *b: kernels.add_rms_norm(*b, eps=1e-6), *a), (0, 1, 2))(
        *arrays
    )
    plain = jax.grad(lambda *a: loss(formula, *a), (0, 1, 2))(*arrays)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), ours, plain)


def test_unlike_branches_are_named() -> None:
    with pytest.raises(KernelError, match="must be alike"):
        kernels.add_rms_norm(jnp.ones((2, 4)), jnp.ones((3, 4)), jnp.ones(4), eps=1e-6)
