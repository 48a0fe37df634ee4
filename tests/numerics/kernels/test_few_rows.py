"""Few rows times the matrices of several layers against sums in float64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fornax import kernels
from fornax.config.errors import KernelError
from fornax.mesh import MeshConfig, make_mesh, use_mesh

SHAPES = [(3, 2, 48, 96), (2, 1, 17, 33), (4, 15, 64, 1100), (1, 5, 7, 16), (5, 8, 130, 20)]


def _needs() -> None:
    if not kernels.runs_few_rows(1, "float32", jnp.zeros((1, 1, 1))):
        pytest.skip("needs a C++ compiler, on one CPU")


def _arrays(shape: tuple[int, ...], x_dtype: str, w_dtype: str) -> Any:
    L, M, K, N = shape
    rng = np.random.default_rng(0)
    return (
        jnp.asarray(rng.normal(size=(L, M, K)), x_dtype),
        jnp.asarray(rng.normal(size=(L, K, N)) * K**-0.5, w_dtype),
        jnp.asarray(rng.normal(size=(L, M, N)), x_dtype),
    )


def _exact(x: jax.Array) -> np.ndarray:
    return np.asarray(x.astype(jnp.float32), np.float64)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("x_dtype", "w_dtype"),
    [("float32", "float32"), ("bfloat16", "float32"), ("bfloat16", "bfloat16")],
)
def test_results_and_gradients_agree_with_float64(
    shape: tuple[int, ...], x_dtype: str, w_dtype: str
) -> None:
    """A matrix is rounded to the dtype of the rows; its gradient to its own alone."""
    _needs()
    x, w, dy = _arrays(shape, x_dtype, w_dtype)
    y, pull = jax.vjp(kernels.few_rows_linear, x, w)
    dx, dw = pull(dy)
    rounded = _exact(w.astype(x_dtype))
    exact = {
        "y": (y, _exact(x) @ rounded, x_dtype),
        "dx": (dx, _exact(dy) @ rounded.swapaxes(1, 2), x_dtype),
        "dw": (dw, _exact(x).swapaxes(1, 2) @ _exact(dy), w_dtype),
    }
    for name, (found, wanted, dtype) in exact.items():
        assert found.dtype == dtype, name
        allowed = (2**-8 if dtype == "bfloat16" else 2e-6) * np.abs(wanted).max()
        np.testing.assert_allclose(_exact(found), wanted, rtol=0, atol=allowed, err_msg=name)


def test_a_weight_that_is_not_a_number_stays_one() -> None:
    _needs()
    x, w, _ = _arrays((2, 2, 8, 40), "bfloat16", "float32")
    for bad in (jnp.nan, -jnp.nan, jnp.inf):
        y = kernels.few_rows_linear(x, w.at[1, 3, 39].set(bad).at[1, 3, 5].set(bad))
        assert not np.isfinite(_exact(y)[1][:, [5, 39]]).any()
        assert np.isfinite(_exact(y)[0]).all()


def test_rows_do_not_depend_on_those_beside_them() -> None:
    _needs()
    x, w, _ = _arrays((2, 7, 60, 90), "float32", "float32")
    whole = kernels.few_rows_linear(x, w)
    for row in range(7):
        alone = kernels.few_rows_linear(x[:, row : row + 1], w)
        np.testing.assert_array_equal(alone[:, 0], whole[:, row])


def test_derivatives_of_derivatives_and_vmap() -> None:
    _needs()
    x, w, dy = _arrays((2, 3, 5, 6), "float32", "float32")

    def by(product: Any) -> Any:
        return lambda x, w: jnp.sum(jnp.sin(product(x, w)) * dy)

    def plain(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.einsum("lmk,lkn->lmn", x, w, precision="highest")

    for which in (0, 1):
        found = jax.hessian(by(kernels.few_rows_linear), which)(x, w)
        np.testing.assert_allclose(found, jax.hessian(by(plain), which)(x, w), atol=2e-5)
    several = jnp.stack([x, 2 * x])
    found = jax.vmap(kernels.few_rows_linear, (0, None))(several, w)
    np.testing.assert_allclose(found, jax.vmap(plain, (0, None))(several, w), atol=2e-5)


def test_it_declines_many_rows_other_devices_and_other_weights() -> None:
    _needs()
    w = jnp.zeros((2, 8, 8))
    assert not kernels.runs_few_rows(16, "float32", w)
    assert kernels.runs_few_rows(15, "float32", w)
    assert not kernels.runs_few_rows(1, "float16", w)
    assert not kernels.runs_few_rows(1, "float32", object())
    with kernels.target_platform("tpu"):
        assert not kernels.runs_few_rows(1, "float32", w)
    with use_mesh(make_mesh(MeshConfig(data=2, fsdp=1), devices=jax.devices()[:2])):
        assert not kernels.runs_few_rows(1, "float32", w)
    with pytest.raises(KernelError, match=r"must be \[L, M, K\] and \[L, K, N\]"):
        kernels.few_rows_linear(w, jnp.zeros((2, 9, 8)))
