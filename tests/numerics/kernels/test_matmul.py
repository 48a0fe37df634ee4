"""The native bfloat16 products and Newton-Schulz iterations against float64 of the same numbers.

Legend: M rows, K summed over, N columns; R, C sides of a matrix.
"""

import ctypes
import subprocess
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fornax.kernels import _matmul, _native, linear
from fornax.kernels._native import units

pytestmark = pytest.mark.skipif(
    not _matmul.runs(jnp.bfloat16, 16, 16, 16), reason="needs AVX512-BF16 and a C++ compiler"
)

FORMS = [_matmul.PLAIN, _matmul.RIGHT_TRANSPOSED, _matmul.LEFT_TRANSPOSED]
SHAPES = [
    (16, 16, 16),
    (32, 64, 96),
    (33, 47, 65),
    (100, 17, 31),
    (257, 192, 512),
    (1024, 192, 130),
]


def matrices(form: int, M: int, N: int, K: int) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(M + N + K)
    a = rng.normal(size=(K, M) if form == _matmul.LEFT_TRANSPOSED else (M, K))
    b = rng.normal(size=(N, K) if form == _matmul.RIGHT_TRANSPOSED else (K, N))
    return jnp.asarray(a, jnp.bfloat16), jnp.asarray(b, jnp.bfloat16)


def exact(a: jax.Array, b: jax.Array, form: int) -> np.ndarray:
    a64, b64 = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return (a64.T if form == _matmul.LEFT_TRANSPOSED else a64) @ (
        b64.T if form == _matmul.RIGHT_TRANSPOSED else b64
    )


Call = Callable[[jax.Array, jax.Array, int, jnp.dtype], jax.Array]


@pytest.fixture(scope="module")
def without_tiles(tmp_path_factory: pytest.TempPathFactory) -> Call:
    """The product as it is on processors without AMX."""
    path: Path = tmp_path_factory.mktemp("native") / "matmul.so"
    cxx = _native.compiler()
    assert cxx is not None
    command = units.compile_command(
        cxx, "matmul", path, include=jax.ffi.include_dir(), march=units.NATIVE
    )
    subprocess.run([*command, "-DFORNAX_WITHOUT_TILES"], check=True)
    target = jax.ffi.pycapsule(ctypes.CDLL(str(path)).fornax_matmul)
    jax.ffi.register_ffi_target("test_matmul_without_tiles", target, platform="cpu")

    def call(a: jax.Array, b: jax.Array, form: int, dtype: jnp.dtype) -> jax.Array:
        result = jax.ShapeDtypeStruct(_matmul._shape(a, b, form), dtype)
        return jax.ffi.ffi_call("test_matmul_without_tiles", result)(a, b, form=np.int64(form))

    return call


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("M", "N", "K"), SHAPES)
@pytest.mark.parametrize("tiles", [True, False], ids=["as it is", "without tiles"])
def test_products_are_summed_in_float32(
    form: int, M: int, N: int, K: int, tiles: bool, without_tiles: Call
) -> None:
    a, b = matrices(form, M, N, K)
    multiply = _matmul.matmul if tiles else without_tiles
    wide = np.asarray(multiply(a, b, form, jnp.dtype(jnp.float32)))
    right = exact(a, b, form)
    bound = np.abs(np.asarray(a, np.float64)).max() * np.abs(np.asarray(b, np.float64)).max()
    np.testing.assert_allclose(wide, right, rtol=0, atol=2**-24 * K * bound)
    narrow = multiply(a, b, form, jnp.dtype(jnp.bfloat16))
    np.testing.assert_array_equal(narrow, jnp.asarray(wide).astype(jnp.bfloat16))


def test_a_row_does_not_depend_on_the_others() -> None:
    """Nor on how many threads share the work: the whole is shared, the rows alone are not."""
    a, b = matrices(_matmul.PLAIN, 1024, 256, 192)
    whole = _matmul.matmul(a, b, _matmul.PLAIN, jnp.float32)
    for start in (0, 160, 1008):
        part = _matmul.matmul(a[start : start + 16], b, _matmul.PLAIN, jnp.float32)
        np.testing.assert_array_equal(part, whole[start : start + 16])


def test_what_is_no_number_stays_where_it_belongs() -> None:
    a, b = matrices(_matmul.PLAIN, 48, 40, 33)
    a = a.at[3, 5].set(jnp.nan).at[7, 2].set(jnp.inf)
    found = np.asarray(_matmul.matmul(a, b, _matmul.PLAIN, jnp.float32))
    assert np.isnan(found[3]).all()
    assert np.isinf(found[7]).all()
    assert np.isfinite(np.delete(found, (3, 7), axis=0)).all()


@pytest.mark.parametrize("form", FORMS)
def test_derivatives_are_those_of_the_product(form: int) -> None:
    a, b = matrices(form, 32, 48, 20)
    pull = jnp.asarray(np.random.default_rng(0).normal(size=(32, 48)), jnp.bfloat16)

    def slopes(product) -> tuple[jax.Array, jax.Array]:
        return jax.vjp(product, a, b)[1](pull)

    ours = slopes(lambda a, b: _matmul.matmul(a, b, form, jnp.bfloat16))
    plain = slopes(lambda a, b: _matmul._plain(a, b, form=form, dtype=jnp.bfloat16))
    for one, other in zip(ours, plain, strict=True):
        np.testing.assert_allclose(
            np.asarray(one, np.float32), np.asarray(other, np.float32), rtol=2**-7, atol=0.02
        )


def test_second_derivatives_and_rows_mapped_over() -> None:
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(3, 16, 24)), jnp.bfloat16)
    w = jnp.asarray(rng.normal(size=(24, 32)), jnp.bfloat16)

    def curvature(product) -> jax.Array:
        slope = jax.grad(lambda w, x: jnp.sum(jnp.sin(product(x, w).astype(jnp.float32))))
        per_row = jax.vmap(slope, in_axes=(None, 0))
        return jax.grad(lambda w: jnp.sum(per_row(w, x).astype(jnp.float32) ** 2))(w)

    ours, plain = curvature(linear), curvature(jnp.matmul)
    difference = np.asarray(ours, np.float32) - np.asarray(plain, np.float32)
    assert np.linalg.norm(difference) < 0.02 * np.linalg.norm(np.asarray(plain, np.float32))


COEFFICIENTS = ((3.4445, -4.7750, 2.0315),) * 5


@pytest.mark.parametrize("shape", [(2, 48, 64), (3, 64, 48), (1, 17, 33), (2, 2, 40, 40)], ids=str)
def test_newton_schulz_is_that_of_the_formula(shape: tuple[int, ...]) -> None:
    """Singular vectors stay, singular values go through the polynomial, to bfloat16's rounding."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=shape)
    found = _matmul.orthogonalize(jnp.asarray(x, jnp.float32), COEFFICIENTS, eps=1e-8)
    assert found is not None
    u, s, v = np.linalg.svd(x, full_matrices=False)
    s = s / np.linalg.norm(s, axis=-1, keepdims=True)
    for a, b, c in COEFFICIENTS:
        s = a * s + b * s**3 + c * s**5
    right = (u * s[..., None, :]) @ v
    error = np.linalg.norm(np.asarray(found) - right, axis=(-2, -1))
    assert (error < 0.03 * np.linalg.norm(right, axis=(-2, -1))).all()


def test_newton_schulz_by_itself_and_by_xla_agree() -> None:
    from fornax.optim import muon

    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=(2, 64, 160)), jnp.float32)
    native = muon.orthogonalize(x, COEFFICIENTS, dtype="bfloat16")
    plain = muon.orthogonalize(x, COEFFICIENTS, dtype="float32")
    assert np.linalg.norm(native - plain) < 0.03 * np.linalg.norm(plain)
    assert not np.array_equal(native, plain)


def test_newton_schulz_declines_what_it_has_no_room_for() -> None:
    assert _matmul.orthogonalize(jnp.ones((1, 1024, 1024)), COEFFICIENTS, eps=1e-8) is None
    assert _matmul.orthogonalize(jnp.ones((1, 8, 1024)), COEFFICIENTS, eps=1e-8) is None
