"""The native products in float32 arithmetic against float64 of the same numbers, on any processor
with AVX2.

Legend: M rows, K summed over, N columns.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.typing import DTypeLike

from fornax.kernels import _matmul, _native, linear
from fornax.mesh import MeshConfig, make_mesh, use_mesh

pytestmark = pytest.mark.skipif(
    not _native.has_features("avx2", "fma") or _native.unavailable("float32_matmul") is not None,
    reason="needs AVX2 and a C++ compiler",
)

FORMS = [_matmul.PLAIN, _matmul.RIGHT_TRANSPOSED, _matmul.LEFT_TRANSPOSED]
SHAPES = [
    (1, 1, 1),
    (5, 3, 7),
    (6, 16, 8),
    (97, 130, 301),
    (181, 65, 385),  # a row more than are copied at once, a number more than are summed at once
    (365, 1601, 40),  # columns more than are copied at once
    (250, 64, 1155),
    (1450, 50, 390),  # rows more than wait for another block of sums
]
TYPES = [
    (jnp.float32, jnp.float32),
    (jnp.bfloat16, jnp.bfloat16),
    (jnp.bfloat16, jnp.float32),
]


def matrices(form: int, M: int, N: int, K: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(M + N + K)
    a = rng.normal(size=(K, M) if form == _matmul.LEFT_TRANSPOSED else (M, K))
    b = rng.normal(size=(N, K) if form == _matmul.RIGHT_TRANSPOSED else (K, N))
    return a.astype(np.float32), b.astype(np.float32)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("M", "N", "K"), SHAPES)
@pytest.mark.parametrize(("of", "to"), TYPES, ids=lambda dtype: jnp.dtype(dtype).name)
@pytest.mark.usefixtures("without_avx512")
def test_products_agree_with_float64(
    form: int, M: int, N: int, K: int, of: DTypeLike, to: DTypeLike
) -> None:
    a, b = (jnp.asarray(each, of) for each in matrices(form, M, N, K))
    call = jax.jit(lambda a, b: _matmul.matmul(a, b, form, to))
    assert "fornax_float32_matmul" in call.lower(a, b).as_text()
    left, right = np.asarray(a, np.float64), np.asarray(b, np.float64)
    exact = (left.T if form == _matmul.LEFT_TRANSPOSED else left) @ (
        right.T if form == _matmul.RIGHT_TRANSPOSED else right
    )
    bound = 2**-24 * K * np.abs(left).max() * np.abs(right).max()
    rounding = 2**-8 if to == jnp.bfloat16 else 0
    np.testing.assert_allclose(np.asarray(call(a, b), np.float64), exact, rounding, bound)


@pytest.mark.usefixtures("without_avx512")
def test_infinities_and_what_is_no_number_stay_so_in_bfloat16() -> None:
    a = np.eye(20, dtype=np.float32)
    a[0, 0], a[1, 1], a[2, 2], a[3, 3] = np.nan, np.inf, -np.inf, 3.4e38
    one = jnp.ones((20, 16), jnp.bfloat16)
    found = _matmul.matmul(jnp.asarray(a, jnp.bfloat16), one, _matmul.PLAIN, jnp.bfloat16)
    wanted = jnp.asarray(a, jnp.bfloat16).astype(jnp.float32) @ one.astype(jnp.float32)
    wanted = wanted.astype(jnp.bfloat16).astype(jnp.float32)
    np.testing.assert_array_equal(found.astype(jnp.float32), wanted)


def test_a_row_does_not_depend_on_the_others() -> None:
    """Nor on how threads divide the work, which they do by rows and columns."""
    a, b = map(jnp.asarray, matrices(_matmul.PLAIN, 1024, 400, 770))
    whole = _matmul.matmul(a, b, _matmul.PLAIN, jnp.float32)
    for start in (0, 161, 1007):
        part = _matmul.matmul(a[start : start + 17], b[:, :48], _matmul.PLAIN, jnp.float32)
        np.testing.assert_array_equal(part, whole[start : start + 17, :48])


@pytest.mark.parametrize("form", FORMS)
def test_what_is_no_number_stays_where_it_belongs(form: int) -> None:
    a, b = matrices(form, 50, 41, 33)
    rows = a.T if form == _matmul.LEFT_TRANSPOSED else a
    rows[3, 5], rows[49, 2] = np.nan, np.inf
    found = np.asarray(_matmul.matmul(jnp.asarray(a), jnp.asarray(b), form, jnp.float32))
    assert np.isnan(found[3]).all()
    assert not np.isfinite(found[49]).any()
    assert np.isfinite(np.delete(found, (3, 49), axis=0)).all()


@pytest.mark.parametrize(
    ("x_shape", "w_shape", "inputs"),
    [
        ((2, 160, 192), (192, 256), 1),
        ((320, 256), (256, 128), 1),  # fewer outputs than inputs
        ((2, 160, 4, 64), (4, 64, 96), 2),
    ],
    ids=str,
)
@pytest.mark.usefixtures("without_avx512")
def test_linear_and_its_gradients_take_them_on_one_device(
    x_shape: tuple[int, ...], w_shape: tuple[int, ...], inputs: int
) -> None:
    rng = np.random.default_rng(0)
    x64, w64 = rng.normal(size=x_shape), rng.normal(size=w_shape)
    dy64 = rng.normal(size=x_shape[: len(x_shape) - inputs] + w_shape[inputs:])
    x, w, dy = (jnp.asarray(each, jnp.float32) for each in (x64, w64, dy64))

    def all_three(x: jax.Array, w: jax.Array) -> tuple[jax.Array, ...]:
        y, pull = jax.vjp(lambda x, w: linear(x, w, inputs=inputs), x, w)
        return (y, *pull(dy))

    assert jax.jit(all_three).lower(x, w).as_text().count("@fornax_float32_matmul") == 3
    rows = range(len(x_shape) - inputs)
    outputs = range(inputs, len(w_shape))
    wanted = (
        np.tensordot(x64, w64, inputs),
        np.tensordot(dy64, w64, (list(range(len(rows), dy64.ndim)), list(outputs))),
        np.tensordot(x64, dy64, (list(rows), list(rows))),
    )
    for found, exact in zip(jax.jit(all_three)(x, w), wanted, strict=True):
        np.testing.assert_allclose(found, exact, rtol=1e-4, atol=2e-4)
    with use_mesh(make_mesh(MeshConfig(data=2), jax.devices()[:2])):
        divided = jax.jit(lambda x, w: all_three(x, w)).lower(x, w)  # traced again
        assert "fornax_float32_matmul" not in divided.as_text()


@pytest.mark.usefixtures("without_avx512")
def test_remat_of_products_computes_none_again_and_vmap_agrees() -> None:
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.normal(size=(256, 256)), jnp.float32) for _ in range(2))

    def products(policy) -> int:
        twice = jax.checkpoint(
            lambda x, w: jnp.sin(linear(jnp.sin(linear(x, w)), w)).sum(), policy=policy
        )
        return str(jax.make_jaxpr(jax.grad(twice))(x, w)).count("native_matmul[")

    names = jax.checkpoint_policies.save_only_these_names
    kept = products(names("linear_output"))
    assert 0 < kept < products(names("none of its results"))
    stacked = jnp.stack([w, 2 * w])
    found = jax.vmap(linear, in_axes=(None, 0))(x, stacked)
    np.testing.assert_allclose(found, jnp.einsum("mk,bkn->bmn", x, stacked), rtol=1e-4, atol=1e-3)


def test_with_avx512_gradients_of_weights_alone_are_native(monkeypatch: pytest.MonkeyPatch) -> None:
    has = _native.has_features
    monkeypatch.setattr(
        _native, "has_features", lambda *names: names == ("avx512f",) or has(*names)
    )
    rng = np.random.default_rng(0)
    x, w, dy = (
        jnp.asarray(rng.normal(size=size), jnp.float32)
        for size in ((256, 128), (128, 192), (256, 192))
    )
    pull = jax.jit(lambda x, w: jax.vjp(linear, x, w)[1](dy))
    assert "fornax_float32_matmul" not in jax.jit(lambda x, w: linear(x, w)).lower(x, w).as_text()
    assert pull.lower(x, w).as_text().count("@fornax_float32_matmul") == 1
    wide_x, wide_w, wide_dy = (np.asarray(each, np.float64) for each in (x, w, dy))
    for found, exact in zip(pull(x, w), (wide_dy @ wide_w.T, wide_x.T @ wide_dy), strict=True):
        np.testing.assert_allclose(found, exact, rtol=1e-4, atol=2e-4)
