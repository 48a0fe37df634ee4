"""Group norm and its gradients against float64, and that an image depends on nothing beside it.

Legend: B batch, S places, C channels, G groups.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from fornax import kernels
from fornax.config.errors import KernelError

EPS = 1e-5
HOWS = ("native", "xla")


def _arrays(shape: tuple[int, ...], dtype: str, seed: int = 0) -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=shape) + rng.normal(size=shape[-1])  # channels of other means
    scale, bias = rng.normal(size=(2, shape[-1]))
    return jnp.asarray(x, dtype), jnp.asarray(scale, "float32"), jnp.asarray(bias, "float32")


def _exact(
    x: jax.Array, scale: Any, bias: Any, dy: Any, *, groups: int, silu: bool
) -> tuple[np.ndarray, ...]:
    """y, and the gradients of x, scale and bias from that of y, in float64."""
    wide, s, b, dy = (
        np.asarray(jnp.asarray(each).astype(jnp.float32), np.float64)
        for each in (x, scale, bias, dy)
    )
    B, C = x.shape[0], x.shape[-1]

    def grouped(array: np.ndarray) -> np.ndarray:
        return array.reshape(B, -1, groups, C // groups)

    def mean(array: np.ndarray) -> np.ndarray:
        found = grouped(array).mean(axis=(1, 3), keepdims=True)
        return np.broadcast_to(found, grouped(array).shape).reshape(x.shape)

    away = wide - mean(wide)
    factor = 1 / np.sqrt(mean(away**2) + EPS)
    normal = away * factor
    z = normal * s + b
    logistic = 1 / (1 + np.exp(-z))
    y = z * logistic if silu else z
    d = dy * (logistic * (1 + z * (1 - logistic)) if silu else 1)
    dx = factor * (s * d - mean(s * d) - normal * mean(normal * s * d))
    axes = tuple(range(x.ndim - 1))
    return y, dx, (normal * d).sum(axis=axes), d.sum(axis=axes)


@pytest.mark.parametrize("implementation", HOWS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("shape", "groups", "activation"),
    [
        ((2, 16, 16, 320), 32, "silu"),
        ((1, 3, 37, 48), 48, None),  # as instance norm
        ((3, 1, 1, 10), 1, "silu"),  # as layer norm, of less than a vector
        ((2, 3, 9, 11, 36), 6, None),  # a video
        ((1, 129, 4), 2, "silu"),
    ],
    ids=str,
)
def test_agrees_with_float64(
    shape: tuple[int, ...], groups: int, activation: Any, dtype: str, implementation: str
) -> None:
    """The result and its gradients."""
    x, scale, bias = _arrays(shape, dtype)
    dy = _arrays(shape, dtype, seed=1)[0]

    @jax.jit
    def run(x: jax.Array, scale: jax.Array, bias: jax.Array, dy: jax.Array) -> Any:
        how: Any = {"groups": groups, "eps": EPS, "activation": activation}
        how["implementation"] = implementation
        y, back = jax.vjp(lambda *a: kernels.group_norm(*a, **how), x, scale, bias)
        return y, *back(dy)

    found = run(x, scale, bias, dy)
    exact = _exact(x, scale, bias, dy, groups=groups, silu=activation == "silu")
    assert [each.dtype for each in found] == [x.dtype, x.dtype, scale.dtype, bias.dtype]
    allowed = 1e-5 if dtype == "float32" else 2**-7
    for name, one, other in zip(("y", "dx", "dscale", "dbias"), found, exact, strict=True):
        wide = np.asarray(one.astype(jnp.float32))
        size = allowed if name in ("y", "dx") else 1e-5 * np.sqrt(x.size / x.shape[-1])
        np.testing.assert_allclose(wide, other, rtol=allowed, atol=size, err_msg=name)


@pytest.mark.parametrize("implementation", HOWS)
def test_a_mean_far_from_zero_costs_no_digits(implementation: str) -> None:
    """A variance by the mean of squares would be all rounding here."""
    x = 1000 + np.random.default_rng(0).normal(size=(1, 400, 16))
    x = jnp.asarray(x, jnp.float32)
    one, zero = jnp.ones(16), jnp.zeros(16)
    y = kernels.group_norm(x, one, zero, groups=4, eps=EPS, implementation=implementation)
    exact = _exact(x, one, zero, x, groups=4, silu=False)[0]
    np.testing.assert_allclose(y, exact, atol=2e-4)


def test_an_image_is_the_same_whatever_is_beside_it() -> None:
    """And its gradient: alone on one thread, in a batch on several."""
    x, scale, bias = _arrays((4, 24, 24, 64), "float32")

    @jax.jit
    def run(x: jax.Array) -> Any:
        norm = lambda x: kernels.group_norm(x, scale, bias, groups=8, eps=EPS, activation="silu")  # noqa: E731
        y, back = jax.vjp(norm, x)
        return y, back(jnp.sin(x))[0]

    whole = run(x)
    for row in range(4):
        alone = run(x[row : row + 1])
        jax.tree.map(
            lambda a, b, row=row: np.testing.assert_array_equal(a[0], b[row]), alone, whole
        )


def test_gradients_are_those_of_finite_differences() -> None:
    arrays = _arrays((2, 5, 7, 12), "float32")

    def run(*arrays: jax.Array) -> jax.Array:
        return kernels.group_norm(*arrays, groups=3, eps=EPS, activation="silu")

    check_grads(run, arrays, order=1, modes=("rev", "fwd"), atol=0.02, rtol=0.02, eps=1e-2)


@pytest.mark.slow
def test_it_is_differentiated_in_part_and_twice() -> None:
    """As the formula is: with frozen arrays, under vmap, and the gradient's own."""
    x, scale, bias = _arrays((2, 6, 8), "float32")

    def norm(x: jax.Array, implementation: str) -> jax.Array:
        how: Any = {"groups": 2, "eps": EPS, "activation": "silu"}
        return kernels.group_norm(x, scale, bias, **how, implementation=implementation)

    def compare(transform: Any) -> None:
        ours, plain = (transform(lambda x, name=name: norm(x, name)) for name in HOWS)
        np.testing.assert_allclose(ours, plain, atol=3e-5)

    compare(lambda f: jax.grad(lambda x: jnp.sin(f(x)).sum())(x))
    compare(lambda f: jax.vmap(jax.grad(lambda x: jnp.sin(f(x)).sum()))(x[:, None]))
    compare(lambda f: jax.hessian(lambda x: f(x)[0, 0, 0])(x))


@pytest.mark.parametrize("implementation", HOWS)
def test_what_is_no_number_stays_in_its_group(implementation: str) -> None:
    x, scale, bias = _arrays((2, 40, 24), "float32")

    def run(x: jax.Array) -> np.ndarray:
        how: Any = {"groups": 4, "eps": EPS, "implementation": implementation}
        return np.asarray(kernels.group_norm(x, scale, bias, **how))

    clean, y = run(x), run(x.at[0, 3, 7].set(jnp.nan))
    assert np.isnan(y[0, :, 6:12]).all()
    np.testing.assert_array_equal(y[1], clean[1])
    np.testing.assert_array_equal(
        y[0][:, [*range(6), *range(12, 24)]], clean[0][:, [*range(6), *range(12, 24)]]
    )


def test_what_is_refused() -> None:
    x, scale, bias = _arrays((2, 5, 12), "float32")
    wrong: Any
    for wrong, said in (
        ({"groups": 5}, "groups=5 does not divide 12 channels"),
        ({"groups": 0}, "groups=0 does not divide"),
        ({"scale_C": scale[:6]}, r"scale\(6,\)"),
        ({"activation": "relu"}, "activation='relu' is unknown"),
        ({"implementation": "quick"}, "implementation='quick' is unknown"),
    ):
        arrays = {"x_BSC": x, "scale_C": scale, "bias_C": bias}
        with pytest.raises(KernelError, match=said):
            kernels.group_norm(**{**arrays, "groups": 4, "eps": EPS, **wrong})
    call = kernels.GroupNormCall(
        platform="cpu", batch=1, places=4, channels=8, groups=2, dtype="float16", activation=None,
        devices=1,
    )  # fmt: skip
    reasons = kernels.group_norm_operation.explain(call)
    assert reasons["native"] == "it takes float32 and bfloat16, not float16"
