"""The bytes that are exchanged, against the definitions of their formats."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from fornax.train.diloco import decode, encode, row_bytes
from fornax.train.diloco.codec import BLOCK

DTYPES = ("float32", "bfloat16", "int8", "e3m0")


def values(seed: int, blocks: int = 64) -> np.ndarray:
    """Blocks of very different sizes, one of zeros, one with ties of E3M0 and of int8."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((blocks, BLOCK)) * 10.0 ** rng.integers(-20, 20, (blocks, 1))
    x[0] = 0
    x[1, :10] = [1, -1, 0.75, -0.75, 0.375, 2**-7, -(2**-7), 2**-8, 0, -0.0]
    x[1, 10:] = np.linspace(-1, 1, BLOCK - 10)
    return x.astype(np.float32)


def by_definition(x: np.ndarray, dtype: str) -> np.ndarray:
    """The nearest value of each format, found by trying all, in float64."""
    exact = x.astype(np.float64)
    if dtype == "float32":
        return exact
    if dtype == "bfloat16":
        return x.astype(ml_dtypes.bfloat16).astype(np.float64)
    scale = np.abs(exact).max(axis=1, keepdims=True)
    if dtype == "int8":
        choices = np.arange(-127, 128) / 127
    else:
        powers = 2.0 ** np.arange(-6, 1)
        choices = np.array([*-powers, 0, *powers])
    table = scale * choices
    nearest = np.abs(exact[..., None] - table[:, None, :]).argmin(axis=-1)
    return np.take_along_axis(table, nearest, axis=1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_value_becomes_the_nearest_one_of_the_format(dtype: str):
    x = values(1)
    rows = encode(jnp.asarray(x.reshape(-1)), dtype)
    assert rows.shape == (64, row_bytes(dtype))
    assert rows.dtype == jnp.uint8
    got = np.asarray(decode(rows, dtype), np.float64).reshape(x.shape)
    want = by_definition(x, dtype)
    error, least = np.abs(got - x), np.abs(want - x)
    scale = np.abs(x).max(axis=1, keepdims=True).astype(np.float64)
    assert (error <= least + 1e-6 * scale).all()  # at a tie either neighbour is nearest
    limit = {
        "float32": 0 * scale,
        "bfloat16": 2.0**-8 * np.abs(x),
        "int8": scale / 254 * (1 + 1e-5),
        "e3m0": np.maximum(np.abs(x) / 3, scale / 128) * (1 + 1e-6),
    }
    assert (error <= limit[dtype]).all()
    assert not got[0].any()


@pytest.mark.parametrize(("dtype", "bits"), [*zip(DTYPES, (32, 16, 8.25, 4.25), strict=True)])
def test_bits_a_value(dtype: str, bits: float):
    assert row_bytes(dtype) * 8 / BLOCK == bits


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_stays_so(dtype: str):
    x = values(2, 4)
    x[2, 5], x[3, 7] = np.nan, np.inf
    got = np.asarray(decode(encode(jnp.asarray(x.reshape(-1)), dtype), dtype)).reshape(x.shape)
    assert not np.isfinite([got[2, 5], got[3, 7]]).any()
    assert np.isfinite(got[:2]).all()


def test_the_bytes_do_not_depend_on_how_many_devices_make_them():
    x = jnp.asarray(values(3).reshape(-1))
    mesh = jax.make_mesh((8,), ("all",))
    over = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("all"))
    for dtype in DTYPES:
        split = jax.jit(encode, static_argnums=1, out_shardings=over)(x, dtype)
        np.testing.assert_array_equal(split, jax.jit(encode, static_argnums=1)(x, dtype))
