"""Products of codes of 8 bits and their gradients against float64 of the same codes.

Legend: B batch, T tokens, M = B T rows, K inputs, N outputs.
"""

import functools
import math
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from fornax.kernels import KernelError, quantized_linear
from fornax.mesh import DEFAULT_RULES, MeshConfig, make_mesh, named_sharding, use_mesh
from fornax.quant.rounding import round_matrix
from fornax.quant.schemes import SCHEMES

SHAPES = [
    ((4, 8, 96), (96, 64), 1),
    ((4, 8, 96), (96, 4, 16), 1),
    ((4, 8, 4, 24), (4, 24, 64), 2),
    ((40, 48), (48, 130), 1),
    ((48,), (48, 33), 1),
]
DTYPES = {"int8": np.int8, "fp8": ml_dtypes.float8_e4m3fn}
LARGEST = {"int8": 127, "fp8": 448}


def arrays(*shapes: tuple[int, ...]) -> list[np.ndarray]:
    """Rows and outputs of very different sizes, some of zeros."""
    rng = np.random.default_rng(sum(map(math.prod, shapes)))
    found = [
        rng.normal(size=shape) * np.exp(3 * rng.normal(size=(*shape[:-1], 1))) for shape in shapes
    ]
    if found[0].ndim > 1:
        found[0][0] = 0
    return [each.astype(np.float32) for each in found]


def dequantized(x: np.ndarray, axes: tuple[int, ...], scheme: str) -> np.ndarray:
    """What the nearest codes stand for, float64."""
    scale = np.abs(x).max(axis=axes, keepdims=True) / np.float32(LARGEST[scheme])
    steps = x / np.where(scale > 0, scale, 1)
    codes = (np.rint(steps) if scheme == "int8" else steps).astype(DTYPES[scheme])
    return codes.astype(np.float64) * scale.astype(np.float64)


def matrices(x: np.ndarray, w: np.ndarray, inputs: int, scheme: str) -> tuple[np.ndarray, ...]:
    """x [M, K] and w [K, N] of the codes."""
    x = dequantized(x, tuple(range(x.ndim - inputs, x.ndim)), scheme)
    w = dequantized(w, tuple(range(inputs)), scheme)
    K = math.prod(w.shape[:inputs])
    return x.reshape(-1, K), w.reshape(K, -1)


@functools.partial(jax.jit, static_argnames=("scheme", "inputs"))
def pull(
    x: jax.Array, w: jax.Array, dy: jax.Array, noise: jax.Array, scheme: str, inputs: int = 1
) -> tuple[jax.Array, ...]:
    """dx and dw."""
    run = jax.vjp(lambda x, w: quantized_linear(x, w, noise, scheme=scheme, inputs=inputs), x, w)
    return run[1](dy)


@pytest.mark.parametrize("scheme", DTYPES)
@pytest.mark.parametrize(("x_shape", "w_shape", "inputs"), SHAPES, ids=str)
def test_the_product_is_that_of_the_nearest_codes(
    x_shape: tuple[int, ...], w_shape: tuple[int, ...], inputs: int, scheme: str
) -> None:
    x, w = arrays(x_shape, w_shape)
    x_MK, w_KN = matrices(x, w, inputs, scheme)
    product = functools.partial(quantized_linear, scheme=scheme, inputs=inputs)
    got = jax.jit(product)(x, w, jnp.uint32(0))
    assert got.shape == x_shape[: len(x_shape) - inputs] + w_shape[inputs:]
    want = x_MK @ w_KN
    # int8: sums are exact. Each scale is rounded twice, since XLA multiplies by 1/127, and the
    # result three times: seven halves of a unit in the last place. float64 sums to 1e-15.
    room = {"int8": 1e-15, "fp8": 1e-6}[scheme] * (np.abs(x_MK) @ np.abs(w_KN))
    assert np.all(np.abs(got.reshape(want.shape) - want) <= 7 * 2**-24 * np.abs(want) + room)


def test_weights_have_the_codes_that_a_file_of_w8a8_has() -> None:
    """What is trained is what `fornax quantize` writes."""
    (w_KN,) = arrays((64, 96))
    codes = round_matrix(w_KN.T, SCHEMES["w8a8"], np.dtype(np.float32))
    y_KN = quantized_linear(np.eye(64, dtype=np.float32), w_KN, jnp.uint32(0), scheme="int8")
    scales_N = codes.grid.scales_PG[:, 0]
    np.testing.assert_array_equal(np.rint(y_KN / scales_N), codes.values_OI.T)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", DTYPES)
@pytest.mark.parametrize(("x_shape", "w_shape", "inputs"), SHAPES[1:3], ids=str)
def test_gradients_have_the_mean_of_the_products_of_what_codes_stand_for(
    x_shape: tuple[int, ...], w_shape: tuple[int, ...], inputs: int, scheme: str
) -> None:
    """Each draw is rounded; the mean of n comes nearer to them by the root of n, and no slower."""
    x, w = arrays(x_shape, w_shape)
    shape = x_shape[: len(x_shape) - inputs] + w_shape[inputs:]
    dy = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    x_MK, w_KN = matrices(x, w, inputs, scheme)
    dy_MN = dy.reshape(len(x_MK), -1).astype(np.float64)
    draws = [pull(x, w, dy, jnp.uint32(n), scheme, inputs) for n in range(256)]
    for got, want in zip(zip(*draws, strict=True), (dy_MN @ w_KN.T, x_MK.T @ dy_MN), strict=True):
        samples = np.stack([np.asarray(each, np.float64).reshape(want.shape) for each in got])
        noise = np.linalg.norm(samples.std(axis=0))
        assert np.linalg.norm(samples.mean(axis=0) - want) < 1.3 * noise / 16
        assert 0 < noise / np.linalg.norm(want) < {"int8": 0.04, "fp8": 0.15}[scheme]


def test_gradients_that_codes_hold_are_exact() -> None:
    """Where nothing is to be rounded, all three products are those of integers."""
    rng = np.random.default_rng(0)
    x, w, dy = (rng.integers(-127, 128, size=s) for s in ((24, 40), (40, 56), (24, 56)))
    x[:, 0] = w[0] = dy[:, 0] = dy[0] = 127
    scaled = x / np.float32(128), w / np.float32(32), dy.astype(np.float32)
    for noise in range(3):
        dx, dw = pull(*scaled, jnp.uint32(noise), "int8")
        np.testing.assert_allclose(dx, dy @ w.T / 32, rtol=3e-7)
        np.testing.assert_allclose(dw, x.T @ dy / 128, rtol=3e-7)


@pytest.mark.parametrize("scheme", DTYPES)
def test_the_same_noise_gives_the_same_bits_and_other_noise_others(scheme: str) -> None:
    x, w, dy = arrays((4, 8, 32), (32, 48), (4, 8, 48))
    first, again, other = (
        jax.tree.map(np.asarray, pull(x, w, dy, jnp.uint32(n), scheme)) for n in (1, 1, 2)
    )
    for one, same, third in zip(first, again, other, strict=True):
        np.testing.assert_array_equal(one, same)
        assert (one != third).mean() > 0.5


@pytest.mark.slow
@pytest.mark.parametrize("scheme", DTYPES)
def test_forwards_the_derivative_is_that_of_what_codes_stand_for(scheme: str) -> None:
    x, w, dx, dw = arrays((4, 32), (32, 48), (4, 32), (32, 48))
    _, dy = jax.jvp(
        lambda x, w: quantized_linear(x, w, jnp.uint32(0), scheme=scheme), (x, w), (dx, dw)
    )
    x_MK, w_KN = matrices(x, w, 1, scheme)
    want = dx @ w_KN + x_MK @ dw
    np.testing.assert_allclose(dy, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())


@pytest.mark.slow
@pytest.mark.parametrize("scheme", DTYPES)
@pytest.mark.parametrize(
    "mesh",
    [MeshConfig(fsdp=8), MeshConfig(data=2, fsdp=2, tensor=2), MeshConfig(fsdp=2, context=4)],
    ids=["fsdp8", "data2-fsdp2-tensor2", "fsdp2-context4"],
)
def test_eight_devices_give_the_codes_of_one_and_gather_them(mesh: MeshConfig, scheme: str) -> None:
    x, w, dy = arrays((8, 16, 64), (64, 96), (8, 16, 96))
    names = ("batch", "length", None), ("embed", "mlp"), ("batch", "length", "activation_mlp")

    def run(x: jax.Array, w: jax.Array, dy: jax.Array) -> tuple[jax.Array, ...]:
        y, pull = jax.vjp(
            lambda x, w: quantized_linear(x, w, jnp.uint32(3), scheme=scheme, axes=names[1]), x, w
        )
        return y, *pull(dy)

    expected = jax.jit(run)(x, w, dy)
    devices = make_mesh(mesh, jax.devices())
    laid = [named_sharding(devices, axes, DEFAULT_RULES) for axes in names]
    with use_mesh(devices):
        compiled = (
            jax.jit(run, in_shardings=laid, out_shardings=(laid[2], laid[0], laid[1]))
            .lower(x, w, dy)
            .compile()
        )
    found = compiled(*map(jax.device_put, (x, w, dy), laid))
    for got, want in zip(found, expected, strict=True):
        room = 0 if scheme == "int8" else 1e-6 * np.abs(want).max()  # sums in another order
        np.testing.assert_allclose(got, want, rtol=0, atol=room)
    # This backend holds float8 as float16 between its operations.
    code = {"int8": "s8", "fp8": "f16"}[scheme]
    gathered = re.findall(r"= (\w+)\[64,[\d,]*\]\S* all-gather\(", compiled.as_text())
    assert set(gathered) == {code}


def test_a_sum_longer_than_int32_has_room_for_is_taken_apart() -> None:
    rows = np.ones((2, 70_000, 3), np.float32)
    _, dw = pull(rows, np.ones((3, 2), np.float32), rows[..., :2], jnp.uint32(0), "int8")
    np.testing.assert_allclose(dw, np.full((3, 2), 140_000.0), rtol=1e-6)


def test_what_is_not_finite_stays_so() -> None:
    x, w, dy = arrays((4, 32), (32, 48), (4, 48))
    x[1, 5], w[3, 7] = np.inf, np.nan
    y = quantized_linear(x, w, jnp.uint32(0), scheme="int8")
    bad = ~np.isfinite(y)
    assert bad[1].all()
    assert bad[:, 7].all()
    assert bad.sum() == 48 + 4 - 1
    dy[2, 2] = np.nan
    dx, dw = pull(*arrays((4, 32), (32, 48)), dy, jnp.uint32(0), "int8")
    assert np.isnan(dx[2]).all()
    assert np.isnan(dw[:, 2]).all()


def test_remat_policies_that_save_products_save_it() -> None:
    x, w = jnp.ones((8, 8)), jnp.ones((8, 8))

    def products(policy) -> int:
        def once(x: jax.Array) -> jax.Array:
            return jnp.sin(quantized_linear(x, w, jnp.uint32(0), scheme="int8"))

        twice = jax.checkpoint(lambda x: once(once(x)).sum(), policy=policy)
        return str(jax.make_jaxpr(jax.grad(twice))(x)).count("dot_general[")

    policies = jax.checkpoint_policies
    saved = products(policies.save_only_these_names("linear_output"))
    assert saved < products(policies.nothing_saveable)


@pytest.mark.slow
def test_a_second_derivative_is_refused() -> None:
    x, w = arrays((4, 8), (8, 8))
    loss = lambda w: jnp.sin(quantized_linear(x, w, jnp.uint32(0), scheme="int8")).sum()  # noqa: E731
    with pytest.raises(KernelError, match="has no derivative"):
        jax.grad(lambda w: jnp.sum(jax.grad(loss)(w) ** 2))(w)


@pytest.mark.parametrize(
    ("x", "w", "options", "message"),
    [
        ((4, 8), (8, 8), {"scheme": "int4"}, "'int4' is not known; use one of int8, fp8"),
        ((4, 8), (9, 8), {"scheme": "int8"}, "last 1 axes"),
        ((4, 8), (8, 8), {"scheme": "int8", "inputs": 3}, "last 3 axes"),
        ((4, 8), (8, 140_000), {"scheme": "int8"}, "140000 inputs or outputs.*use fp8"),
        ((1, 140_000, 8), (8, 8), {"scheme": "int8"}, "rows of 140000 tokens.*shorter rows"),
    ],
)
def test_refuses_what_it_cannot_multiply(
    x: tuple[int, ...], w: tuple[int, ...], options: dict, message: str
) -> None:
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (x, w)]
    loss = lambda x, w: quantized_linear(x, w, jnp.uint32(0), **options).sum()  # noqa: E731
    with pytest.raises(KernelError, match=message):
        jax.eval_shape(jax.grad(loss, (0, 1)), *shapes)
