"""Convolutions and their gradients against sums in float64; images do not depend on others."""

import dataclasses
import itertools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.cases import one_in

from fornax import kernels
from fornax.config.errors import KernelError
from fornax.kernels import _convolution, _matmul, _native
from fornax.models.remat import rematerialise

CASES = [
    ((2, 11, 13, 40), (3, 3), 24, {}),
    ((1, 16, 16, 64), (3, 3), 72, {"stride": 2, "padding": ((0, 1), (0, 1))}),
    ((3, 7, 5, 33), (1, 1), 17, {}),
    ((1, 5, 6, 7, 16), (3, 3, 3), 40, {"padding": ((2, 0), (1, 1), (1, 1))}),  # causal
    ((1, 9, 4, 16), (5, 2), 16, {"stride": (1, 3), "padding": ((0, 0), (2, 3))}),
]


def _arrays(shape: tuple[int, ...], window: tuple[int, ...], outputs: int, dtype: str) -> Any:
    rng = np.random.default_rng(0)
    kernel = rng.normal(size=(*window, shape[-1], outputs)) * (shape[-1] * np.prod(window)) ** -0.5
    x, kernel = (jnp.asarray(each, dtype) for each in (rng.normal(size=shape), kernel))
    return x, kernel, jnp.asarray(rng.normal(size=outputs), "float32")


def _exact(x: Any, kernel: Any, bias: Any, stride: Any = 1, padding: Any = None) -> np.ndarray:
    x, kernel = (np.asarray(each.astype(jnp.float32), np.float64) for each in (x, kernel))
    axes = x.ndim - 2
    window = kernel.shape[:axes]
    strides = (stride,) * axes if isinstance(stride, int) else stride
    padding = padding or [((w - 1) // 2, w // 2) for w in window]
    x = np.pad(x, [(0, 0), *padding, (0, 0)])
    out = [(n - w) // s + 1 for n, w, s in zip(x.shape[1:], window, strides, strict=False)]
    y = np.zeros((x.shape[0], *out, kernel.shape[-1]))
    for tap in itertools.product(*map(range, window)):
        cut = [slice(t, t + (o - 1) * s + 1, s) for t, o, s in zip(tap, out, strides, strict=True)]
        y += x[(slice(None), *cut)] @ kernel[tap]
    return y + np.asarray(bias, np.float64)


@pytest.mark.parametrize(
    ("dtype", "implementation"),
    [
        ("bfloat16", "native"),
        ("bfloat16", "xla"),
        ("float32", "xla"),
    ],
)
@pytest.mark.parametrize(("shape", "window", "outputs", "options"), CASES, ids=str)
def test_agrees_with_float64(
    shape: Any, window: Any, outputs: int, options: Any, dtype: str, implementation: str
) -> None:
    _needs(implementation)
    x, kernel, bias = _arrays(shape, window, outputs, dtype)
    y = kernels.convolution(x, kernel, bias, **options, implementation=implementation)
    exact = _exact(x, kernel, bias, **options)
    assert y.dtype == x.dtype
    allowed = {"native": 2**-8, "xla": 2**-6 if dtype == "bfloat16" else 1e-5}[implementation]
    np.testing.assert_allclose(y.astype(jnp.float32), exact, rtol=allowed, atol=allowed)


@pytest.fixture(params=["avx512", "avx2"])
def native(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """As this processor convolves, and as one with AVX2 alone, which has float32 arithmetic for
    bfloat16 too; small images too."""
    if request.param == "avx2":
        request.getfixturevalue("without_avx512")
    if (
        not _native.has_features("avx2", "fma")
        or _native.unavailable("float32_convolution") is not None
    ):
        pytest.skip("needs AVX2 and a C++ compiler")
    monkeypatch.setattr(_matmul, "LEAST", 0)


LARGER = [
    ((2, 29, 31, 52), (3, 3), 70, {}),  # several blocks of places, of the depth and of its taps
    ((1, 40, 40, 33), (5, 3), 16, {"stride": (2, 1)}),
    ((2, 12, 13, 130), (3, 3), 134, {}),  # more than a part of a patch, and of one turned around
]


@pytest.mark.parametrize(
    ("dtype", "of_kernel"),
    [("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float32", "float32")],
)
@pytest.mark.parametrize(
    ("shape", "window", "outputs", "options"), one_in(2, CASES + LARGER), ids=str
)
@pytest.mark.usefixtures("native")
def test_results_and_gradients_agree_with_float64(
    shape: Any, window: Any, outputs: int, options: Any, dtype: str, of_kernel: str
) -> None:
    """A kernel is rounded to the dtype of x; its gradient to its own."""
    x, kernel, bias = _arrays(shape, window, outputs, dtype)
    if of_kernel != dtype:  # which rounds to what it was
        kernel = kernel.astype(of_kernel) * (1 + 2**-12)
        rounded = kernel.astype(dtype)
    else:
        rounded = kernel

    def run(*arrays: jax.Array) -> jax.Array:
        return kernels.convolution(*arrays, **options, implementation="native")

    text = jax.jit(jax.grad(lambda *a: run(*a).astype(jnp.float32).sum(), 1)).lower(x, kernel, bias)
    assert f"@fornax_{_convolution._unit_of(dtype)}_kernel_gradient" in text.as_text()
    y, pull = jax.vjp(run, x, kernel, bias)
    dy = jnp.asarray(np.random.default_rng(1).normal(size=y.shape), dtype)
    exact = (_exact(x, rounded, bias, **options), *_exact_gradients(x, rounded, dy, **options))
    found_all = (y, *pull(dy))
    assert [each.dtype for each in found_all] == [dtype, dtype, of_kernel, "float32"]
    wide = _convolution._unit_of(dtype) == "convolution" and of_kernel == "float32"
    for name, one, other in zip("yxkb", found_all, exact, strict=True):
        rounds = dtype == "bfloat16" and not (name == "k" and wide)
        allowed = 2**-8 if rounds else 1e-5
        found = np.asarray(one.astype(jnp.float32))
        np.testing.assert_allclose(found, other, atol=allowed * np.abs(other).max(), err_msg=name)


@pytest.mark.usefixtures("native")
def test_an_image_in_float32_is_the_same_whatever_is_beside_it() -> None:
    x, kernel, bias = _arrays((3, 21, 19, 48), (3, 3), 64, "float32")
    whole = kernels.convolution(x, kernel, bias, implementation="native")
    for row in range(3):
        alone = kernels.convolution(x[row : row + 1], kernel, bias, implementation="native")
        np.testing.assert_array_equal(alone[0], whole[row])


def _needs(implementation: str) -> None:
    call = kernels.ConvolutionCall(
        platform="cpu", batch=1, space=(8, 8), window=(3, 3), stride=(1, 1),
        padding=((1, 1), (1, 1)), channels=16, outputs=16, dtype="bfloat16", bias=True, devices=1,
    )  # fmt: skip
    reason = kernels.convolution_operation.explain(call)[implementation]
    if reason != "can run it":
        pytest.skip(reason)


def test_an_image_is_the_same_whatever_is_beside_it() -> None:
    _needs("native")
    x, kernel, bias = _arrays((3, 21, 19, 48), (3, 3), 64, "bfloat16")
    whole = kernels.convolution(x, kernel, bias, implementation="native")
    for row in range(3):
        alone = kernels.convolution(x[row : row + 1], kernel, bias, implementation="native")
        np.testing.assert_array_equal(alone[0], whole[row])


@pytest.mark.parametrize("options", [{}, {"stride": 2}])
def test_gradients_are_those_of_the_sum(options: Any) -> None:
    """The result is linear in x and in the kernel: products with a direction tell."""
    arrays = _arrays((2, 8, 8, 16), (3, 3), 16, "float32")
    wide = [jnp.asarray(each, jnp.bfloat16) for each in arrays]
    dy = jnp.cos(jnp.arange(2 * (8 // options.get("stride", 1)) ** 2 * 16.0))
    dy = dy.astype(jnp.bfloat16).astype(jnp.float32)
    how = {"dtype": jnp.float32}

    def loss(*arrays: jax.Array) -> jax.Array:
        y = kernels.convolution(*arrays, **options).astype(**how).ravel()
        return jnp.vdot(y, dy)

    exact = jax.grad(loss, argnums=(0, 1, 2))(*arrays)
    for name, one, other in zip(
        "xkb", jax.grad(loss, argnums=(0, 1, 2))(*wide), exact, strict=True
    ):
        assert one.dtype == jnp.bfloat16
        size = float(jnp.max(jnp.abs(other)))
        np.testing.assert_allclose(one.astype(**how), other, atol=2**-6 * size, err_msg=name)
    direction = jnp.asarray(np.random.default_rng(3).normal(size=arrays[0].shape), jnp.float32)
    moved = loss(arrays[0] + direction, *arrays[1:]) - loss(*arrays)
    np.testing.assert_allclose(jnp.vdot(exact[0], direction), moved, rtol=1e-3, atol=1e-3)


def _exact_gradients(x: Any, kernel: Any, dy: Any, stride: Any = 1, padding: Any = None) -> Any:
    """Of the sum in `_exact`, tap by tap."""
    x, kernel, dy = (np.asarray(each.astype(jnp.float32), np.float64) for each in (x, kernel, dy))
    axes = x.ndim - 2
    window, out = kernel.shape[:axes], dy.shape[1:-1]
    strides = (stride,) * axes if isinstance(stride, int) else stride
    padding = padding or [((w - 1) // 2, w // 2) for w in window]
    wide = np.pad(x, [(0, 0), *padding, (0, 0)])
    dwide, dkernel = np.zeros_like(wide), np.zeros_like(kernel)
    for tap in itertools.product(*map(range, window)):
        cut = [slice(t, t + (o - 1) * s + 1, s) for t, o, s in zip(tap, out, strides, strict=True)]
        dkernel[tap] = np.tensordot(wide[(slice(None), *cut)], dy, (range(axes + 1),) * 2)
        dwide[(slice(None), *cut)] += dy @ kernel[tap].T
    inner = [slice(first, first + n) for (first, _), n in zip(padding, x.shape[1:], strict=False)]
    return dwide[(slice(None), *inner)], dkernel, dy.sum(tuple(range(axes + 1)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("shape", "window", "outputs", "options"), CASES, ids=str)
def test_gradients_agree_with_float64(
    shape: Any, window: Any, outputs: int, options: Any, dtype: str
) -> None:
    x, kernel, bias = _arrays(shape, window, outputs, dtype)
    y, pull = jax.vjp(lambda *args: kernels.convolution(*args, **options), x, kernel, bias)
    dy = jnp.asarray(np.random.default_rng(1).normal(size=y.shape), dtype)
    allowed = 2**-8 if dtype == "bfloat16" else 1e-5
    exact = _exact_gradients(x, kernel, dy, **options)
    for name, one, other in zip(("x", "kernel", "bias"), pull(dy), exact, strict=True):
        size = np.abs(other).max()
        found = np.asarray(one.astype(jnp.float32))
        np.testing.assert_allclose(found, other, atol=allowed * size, err_msg=name)


def test_nothing_is_computed_for_what_is_frozen() -> None:
    _needs("native")
    x, kernel, bias = _arrays((2, 8, 8, 16), (3, 3), 16, "bfloat16")

    def calls(argument: int) -> tuple[int, int]:
        def loss(x: Any, kernel: Any) -> jax.Array:
            return jnp.sum(kernels.convolution(x, kernel, bias).astype(jnp.float32) ** 2)

        text = jax.jit(jax.grad(loss, argnums=argument)).lower(x, kernel).as_text()
        return text.count("@fornax_convolution("), text.count(
            "@fornax_convolution_kernel_gradient("
        )

    assert calls(0) == (2, 0)
    assert calls(1) == (1, 1)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_policy_of_products_keeps_convolutions(dtype: str) -> None:
    x, kernel, bias = _arrays((1, 8, 8, 32), (3, 3), 32, dtype)

    def layer(x: Any, kernel: Any) -> jax.Array:
        return jnp.sin(kernels.convolution(jnp.tanh(kernels.convolution(x, kernel, bias)), kernel))

    def count(remat: Any) -> int:
        def loss(x: Any, kernel: Any) -> jax.Array:
            run = rematerialise(layer, remat, prevent_cse=True)
            return jnp.sum(run(x, kernel).astype(jnp.float32))

        text = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(x, kernel).as_text()
        return text.count("@fornax_convolution") + text.count("stablehlo.convolution")

    assert count("dots") == count("none") == 6
    assert count("full") == 8


def test_a_call_survives_the_way_to_another_process() -> None:
    """As the tuner sends it; what comes out can be measured."""
    call = kernels.ConvolutionCall(
        platform="cpu", batch=1, space=(6, 5), window=(3, 3), stride=(1, 1),
        padding=((1, 1), (1, 1)), channels=4, outputs=4, dtype="float32", bias=True, devices=1,
    )  # fmt: skip
    again = kernels.ConvolutionCall(**json.loads(json.dumps(dataclasses.asdict(call))))
    assert again == call
    operation = kernels.convolution_operation
    [xla] = operation.candidates(again)
    assert jax.tree.leaves(operation.benchmark(again, xla.run)())[0].shape == (1, 6, 5, 4)


def test_what_is_refused() -> None:
    x, kernel, bias = _arrays((1, 8, 8, 16), (3, 3), 16, "bfloat16")
    wrong: Any
    for wrong, said in (
        ({"kernel": kernel[..., :8, :]}, r"kernel\(3, 3, 8, 16\) must be"),
        ({"kernel": kernel.astype(jnp.int32)}, "use floating dtypes"),
        ({"bias_N": bias[:3]}, r"bias\(3,\) must be \(16,\)"),
        ({"stride": 0}, "stride=0"),
        ({"padding": ((1, 1),)}, "must be 2 numbers"),
        ({"x": x[:, :2], "padding": ((0, 0), (0, 0))}, "does not fit"),
        ({"x": x.astype(jnp.float32), "kernel": kernel.astype(jnp.float32),
          "implementation": "native"}, "multiplications or more"),
    ):  # fmt: skip
        with pytest.raises(KernelError, match=said):
            kernels.convolution(**{"x": x, "kernel": kernel, "bias_N": bias, **wrong})
