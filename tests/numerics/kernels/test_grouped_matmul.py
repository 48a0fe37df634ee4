"""Every grouped product against float64 sums in NumPy: values, gradients, padding, transformations.

Legend: M rows, E groups, K inputs, N outputs.
"""

from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec
from jax.test_util import check_grads
from tests.cases import one_in
from tests.memory import let_programs_go

from fornax import kernels
from fornax.kernels import _native
from fornax.mesh import MeshConfig, make_mesh, use_mesh

Array = np.ndarray | jax.Array

CASES: dict[str, tuple[int, int, int, list[int]]] = {
    "some without rows, and padding": (37, 20, 33, [5, 0, 30, 0]),
    "one group": (300, 64, 48, [300]),
    "one group, padding": (50, 8, 8, [49]),
    "all rows in one": (600, 130, 300, [0, 600, 0]),
    "none at all": (9, 16, 8, [0, 0]),
    "a row each": (8, 65, 70, [1] * 8),
    "few rows": (60, 129, 131, [1, 2, 3, 4, 5, 7, 12, 13, 13]),
    "small": (40, 7, 5, [20, 20]),
    "one by one": (6, 1, 1, [2, 3]),
    "larger than a block in every way": (1000, 1035, 301, [1, 2, 3, 470, 517]),
    "many groups": (512, 96, 160, [int(250 / (e + 1)) // 2 for e in range(64)]),
    "deep": (700, 33, 270, [0, 700]),
}
"""Rows, inputs, outputs and the groups' sizes."""


def _names() -> list[str]:
    return [i.name for i in kernels.grouped_matmul_operation.implementations]


PLATFORMS = {"megablox": "tpu", "ragged_dot": "gpu"}
"""Where an implementation is chosen, if not on CPU; here its kernels are interpreted there."""
INTERPRETED = ("some without rows, and padding", "none at all", "few rows", "all rows in one")


@pytest.fixture(autouse=True)
def small_process() -> Iterator[None]:
    """Many cases compile their own programs."""
    yield
    let_programs_go(1600)


@pytest.fixture(params=_names())
def implementation(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """Each implementation, if it runs here, with tiles so small that the cases fill several."""
    monkeypatch.setattr("fornax.kernels._grouped.tpu._MOST_ROWS", 128)
    monkeypatch.setattr("fornax.kernels._grouped.tpu._MOST_BYTES", 1024)
    platform = PLATFORMS.get(request.param, "cpu")
    case = request.node.callspec.params.get("case")
    if platform == "tpu" and case not in (None, *INTERPRETED):
        pytest.skip("interpreted kernels take seconds: a few cases have all that tiles can meet")
    call = kernels.GroupedCall(platform, 8, 2, 8, 8, "float32", devices=1)
    reason = kernels.grouped_matmul_operation.explain(call)[request.param]
    if reason != "can run it":
        pytest.skip(reason)
    with kernels.target_platform(platform, interpret=True):
        yield request.param


def _arrays(case: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    M, K, N, sizes = CASES[case]
    rng = np.random.default_rng(0)
    shapes = (M, K), (len(sizes), K, N), (M, N)
    x_MK, w_EKN, dy_MN = (rng.normal(size=shape) for shape in shapes)
    return x_MK, w_EKN, dy_MN


def _expected(arrays: Sequence[Array], sizes: list[int]) -> list[np.ndarray]:
    x_MK, w_EKN, dy_MN = (np.asarray(a, np.float64) for a in arrays)
    y_MN, dx_MK, dw_EKN = np.zeros_like(dy_MN), np.zeros_like(x_MK), np.zeros_like(w_EKN)
    first = 0
    for e, size in enumerate(sizes):
        own = slice(first, first + size)
        y_MN[own] = x_MK[own] @ w_EKN[e]
        dx_MK[own] = dy_MN[own] @ w_EKN[e].T
        dw_EKN[e] = x_MK[own].T @ dy_MN[own]
        first += size
    return [y_MN, dx_MK, dw_EKN]


def _run(implementation: str | None, arrays: Sequence[Array], sizes: list[int]) -> list[jax.Array]:
    """Return the product, and the gradients of x and w, compiled with traced sizes."""

    def run(x: jax.Array, w: jax.Array, dy: jax.Array, sizes: jax.Array) -> list[jax.Array]:
        def product(x: jax.Array, w: jax.Array) -> jax.Array:
            return kernels.grouped_matmul(x, w, sizes, implementation=implementation)

        y, pull = jax.vjp(product, x, w)
        return [y, *pull(dy)]

    return jax.jit(run)(*arrays, jnp.asarray(sizes, jnp.int32))


@pytest.mark.parametrize("case", one_in(4, CASES))
def test_float32_agrees_with_float64(case: str, implementation: str) -> None:
    arrays, sizes = _arrays(case), CASES[case][3]
    narrow = [a.astype(np.float32) for a in arrays]
    expected = _expected(narrow, sizes)
    for found, value in zip(_run(implementation, narrow, sizes), expected, strict=True):
        assert found.dtype == jnp.float32
        np.testing.assert_allclose(found, value, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", one_in(4, CASES))
def test_bfloat16_is_summed_in_float32(case: str, implementation: str) -> None:
    sizes = CASES[case][3]
    narrow = [jnp.asarray(a, jnp.bfloat16) for a in _arrays(case)]
    expected = _expected(narrow, sizes)
    for found, value in zip(_run(implementation, narrow, sizes), expected, strict=True):
        assert found.dtype == jnp.bfloat16
        # Rounded once: to half of the last of 8 bits, and what sums in float32 add to it.
        np.testing.assert_allclose(np.float64(found), value, rtol=2.0**-8, atol=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_padding_of_nan_is_zeros_and_no_rows_are_a_gradient_of_zeros(
    dtype: str, implementation: str
) -> None:
    case = "some without rows, and padding"
    _, _, _, sizes = CASES[case]
    x, w, dy = (jnp.asarray(a, dtype) for a in _arrays(case))
    padded = [a.at[sum(sizes) :].set(jnp.nan) for a in (x, dy)]
    y, dx, dw = _run(implementation, [padded[0], w, padded[1]], sizes)
    clean = _run(implementation, [x, w, dy], sizes)
    for found, value in zip((y, dx, dw), clean, strict=True):
        np.testing.assert_array_equal(np.float32(found), np.float32(value))
    assert not np.any(y[sum(sizes) :])
    assert not np.any(dx[sum(sizes) :])
    for e, size in enumerate(sizes):
        assert np.any(dw[e]) == (size > 0)


def test_a_group_does_not_see_what_is_not_finite_in_another(implementation: str) -> None:
    if implementation == "ragged_dot":
        pytest.skip("on CPU XLA adds zeros times the other groups' matrices")
    x, w, dy = (a.astype(np.float32) for a in _arrays("few rows"))
    sizes = CASES["few rows"][3]
    w[3] = np.inf
    y, dx, _ = _run(implementation, [x, w, dy], sizes)
    own = np.repeat(np.arange(len(sizes)), sizes) == 3
    assert np.all(np.isfinite(y[~own]))
    assert np.all(np.isfinite(dx[~own]))
    assert not np.any(np.isfinite(y[own]))


@pytest.mark.parametrize("name", ["reference", "blockwise"])
def test_gradients_agree_with_finite_differences(name: str) -> None:
    with jax.enable_x64(True):
        x, w, _ = (jnp.asarray(a) for a in _arrays("some without rows, and padding"))
        sizes = jnp.asarray(CASES["some without rows, and padding"][3], jnp.int32)
        check_grads(
            lambda x, w: kernels.grouped_matmul(x, w, sizes, implementation=name),
            (x, w),
            order=1,
            modes=["rev"],
        )


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", ["few rows", "some without rows, and padding"])
def test_a_layer_of_a_stack_is_read_in_place(case: str, stored: str, implementation: str) -> None:
    """x is rounded as the matrices are; sums, and what the native kernel gives back, are not."""
    x, w, dy = _arrays(case)
    sizes = CASES[case][3]
    stack_LEKN = jnp.asarray(np.stack([w * 0, w, w * np.nan]), stored)
    narrow = jnp.asarray(x, stored), stack_LEKN[1], dy

    @jax.jit
    def product(x: jax.Array, stack: jax.Array, layer: jax.Array, sizes: jax.Array) -> jax.Array:
        weight = kernels.GroupedWeight(values=stack).at(layer)
        return kernels.grouped_matmul(x, weight, sizes, implementation=implementation)

    found = product(jnp.asarray(x, jnp.float32), stack_LEKN, jnp.int32(1), jnp.asarray(sizes))
    assert found.dtype == jnp.float32
    tolerance = 1e-4 if "float32" in (stored, _unrounded(implementation)) else 2.0**-8
    expected = _expected(narrow, sizes)[0]
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=1e-3)


def _unrounded(implementation: str) -> str:
    return "float32" if implementation == "native" else ""


def _layers(implementation: str | None) -> Callable[..., jax.Array]:
    """A loss through three scanned layers under remat, each a product there and one back."""

    def loss(x_MK: jax.Array, w_LEKN: jax.Array, sizes_E: jax.Array) -> jax.Array:
        @jax.checkpoint
        def layer(x_MK: jax.Array, w_EKN: jax.Array) -> tuple[jax.Array, None]:
            y = kernels.grouped_matmul(x_MK, w_EKN, sizes_E, implementation=implementation)
            back = jnp.swapaxes(w_EKN, 1, 2)
            z = kernels.grouped_matmul(jnp.tanh(y), back, sizes_E, implementation=implementation)
            return x_MK + z, None

        return jnp.sum(jnp.sin(jax.lax.scan(layer, x_MK, w_LEKN)[0]))

    return loss


def _layered_arrays(rows: int) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(1)
    x_MK = jnp.asarray(rng.normal(size=(rows, 24)), jnp.float32)
    return x_MK, jnp.asarray(rng.normal(size=(3, 4, 24, 40)) / 5, jnp.float32)


def test_under_jit_remat_and_scan(implementation: str) -> None:
    x_MK, w_LEKN = _layered_arrays(90)
    sizes_E = jnp.asarray([30, 0, 41, 12], jnp.int32)
    run = [jax.jit(jax.value_and_grad(_layers(i), (0, 1))) for i in (implementation, "reference")]
    found, expected = (one(x_MK, w_LEKN, sizes_E) for one in run)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), found, expected
    )


@pytest.mark.slow
def test_on_eight_devices_in_shard_map(implementation: str) -> None:
    """Rows of their own on each device, matrices shared: their gradient is a sum over devices."""
    rows = 30
    x_MK, w_LEKN = _layered_arrays(8 * rows)
    sizes_DE = np.asarray([[30, 0, 0, 0], [0, 30, 0, 0], [7, 8, 9, 1], [0] * 4] * 2, np.int32)
    mesh = make_mesh(MeshConfig(fsdp=1, data=8), jax.devices()[:8])

    def local(x_MK: jax.Array, w_LEKN: jax.Array, sizes_1E: jax.Array) -> jax.Array:
        return _layers(implementation)(x_MK, w_LEKN, sizes_1E[0])[None]

    data = PartitionSpec("data")

    def loss(x_MK: jax.Array, w_LEKN: jax.Array) -> jax.Array:
        over = jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(data, PartitionSpec(), data),
            out_specs=data,
            check_vma=False,
        )
        return jnp.sum(over(x_MK, w_LEKN, jnp.asarray(sizes_DE)))

    with use_mesh(mesh):
        found = jax.jit(jax.value_and_grad(loss, (0, 1)))(x_MK, w_LEKN)
    alone = jax.jit(jax.value_and_grad(_layers("reference"), (0, 1)))
    parts = [alone(x_MK[d * rows :][:rows], w_LEKN, jnp.asarray(sizes_DE[d])) for d in range(8)]
    np.testing.assert_allclose(found[0], sum(loss for loss, _ in parts), rtol=1e-4)
    dx_MK = np.concatenate([dx for _, (dx, _) in parts])
    np.testing.assert_allclose(found[1][0], dx_MK, rtol=1e-4, atol=1e-4)
    dw_LEKN = sum(np.asarray(dw) for _, (_, dw) in parts)
    np.testing.assert_allclose(found[1][1], dw_LEKN, rtol=1e-4, atol=1e-4)


def test_outside_shard_map_a_mesh_gets_what_xla_can_divide() -> None:
    x_MK, w_LEKN = _layered_arrays(64)
    sizes_E = jnp.asarray([20, 0, 30, 10], jnp.int32)
    expected = kernels.grouped_matmul(x_MK, w_LEKN[0], sizes_E)
    mesh: Mesh = make_mesh(MeshConfig(fsdp=8), jax.devices()[:8])
    with use_mesh(mesh), kernels.recording_choices() as made:
        found = jax.jit(kernels.grouped_matmul)(x_MK, w_LEKN[0], sizes_E)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    (choice,) = made
    assert choice.implementation == "blockwise"
    assert "divides arrays over 8 devices" in str(choice)


@pytest.mark.skipif(_native.unavailable("grouped") is not None, reason="needs a C++ compiler")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_native_rows_have_the_same_bits_in_any_company(dtype: str) -> None:
    K, N = 1100, 330
    rng = np.random.default_rng(3)
    tiny = np.where(np.arange(400) % 5, 1, 2e-39)  # a denormal number, and sums around the least
    x = jnp.asarray(rng.normal(size=(400, K)) * tiny[:, None], dtype)
    w = jnp.asarray(rng.normal(size=(2, K, N)), dtype)
    product = jax.jit(lambda *args: kernels.grouped_matmul(*args, implementation="native"))
    whole = np.asarray(product(x, w, jnp.asarray([390, 10], jnp.int32)), np.float32)
    for first, count in [(0, 1), (3, 2), (100, 5), (380, 10), (17, 12), (17, 13), (60, 300)]:
        some = product(x[first : first + count], w, jnp.asarray([count, 0], jnp.int32))
        np.testing.assert_array_equal(np.asarray(some, np.float32), whole[first : first + count])


def test_without_rows_or_outputs_there_is_nothing_to_compute() -> None:
    def total(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.sum(kernels.grouped_matmul(x, w, jnp.zeros((w.shape[0],), jnp.int32)))

    for x, w in [
        ((0, 4), (2, 4, 3)),
        ((5, 4), (2, 4, 0)),
        ((5, 0), (2, 0, 3)),
        ((5, 4), (0, 4, 3)),
    ]:
        dx, dw = jax.grad(total, (0, 1))(jnp.ones(x), jnp.ones(w))
        assert dx.shape == x
        assert dw.shape == w
        assert not np.any(dx)
        assert not np.any(dw)


@pytest.mark.parametrize(
    ("x", "w", "sizes", "reason"),
    [
        pytest.param((4, 3), (2, 5, 6), (2,), "with one K", id="inputs"),
        pytest.param((4, 5), (2, 5, 6), (3,), "one for each of the 2 matrices", id="groups"),
        pytest.param((5,), (2, 5, 6), (2,), r"must be \[M, K\]", id="dimensions"),
    ],
)
def test_what_does_not_fit_is_refused(
    x: tuple[int, ...], w: tuple[int, ...], sizes: tuple[int, ...], reason: str
) -> None:
    with pytest.raises(kernels.KernelError, match=reason):
        kernels.grouped_matmul(jnp.ones(x), jnp.ones(w), jnp.ones(sizes, jnp.int32))


def test_dtypes_that_do_not_fit_are_refused() -> None:
    x, w = jnp.ones((4, 5)), jnp.ones((2, 5, 6))
    with pytest.raises(kernels.KernelError, match="one floating dtype for both"):
        kernels.grouped_matmul(x, w.astype(jnp.bfloat16), jnp.ones(2, jnp.int32))
    with pytest.raises(kernels.KernelError, match="must be int32"):
        kernels.grouped_matmul(x, w, jnp.ones(2))
